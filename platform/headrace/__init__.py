"""Headrace's control plane and face: the Serve app, gateway, router, configuration and CLI.

Imports every other package of the distribution and is imported by none of them.
"""

__version__ = "0.1.0"
