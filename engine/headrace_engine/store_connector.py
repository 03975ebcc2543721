"""`HeadraceConnector`: the KV store in an engine, its loads priced by the engine's step times."""

from __future__ import annotations

from headrace_engine.connector.connector import StoreConnector
from headrace_engine.steptime import StepTime


class HeadraceConnector(StoreConnector):
    """The node's KV store as a connector. KV in a slow tier is computed if that is faster."""

    make_step_time = StepTime
