"""Makes Python's full garbage collections short and rare in a server's process.

A full collection visits every object and holds the interpreter's lock: all streams wait for it.

    objects of the start   a gateway has 180,000 of them after its imports, a decode replica
                           850,000: 0.2 and 0.7 s on a busy laptop core, at any body of many parts.
                           They are frozen (`gc.freeze`), so collections do not visit them
    objects of requests    those of 1,200 streams in a gateway: 0.12 s, every 13 s, and none of
                           them was garbage. So full collections begin ten times as rarely

The two younger generations, in which most cycles are found, are collected by Python's own rules.
"""

from __future__ import annotations

import gc

RARER = 10
"""Factor of the collections of the second generation between two full ones. With Python's own
thresholds 700,000 objects at most wait in garbage for a full collection."""


def limit_full_collections() -> None:
    """Collect the garbage of the start, freeze all other objects, and make full collections rare.

    Call it once, before the first request. Frozen objects that become garbage later stay in memory.
    """
    gc.collect()
    gc.freeze()
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, RARER * full)
