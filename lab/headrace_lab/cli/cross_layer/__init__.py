"""`headrace lab cross-layer`: make models whose upper layers keep no KV."""

from headrace_lab.cli.cross_layer.commands import cross_layer_app

__all__ = ["cross_layer_app"]
