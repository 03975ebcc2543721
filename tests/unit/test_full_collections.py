"""Objects of a server's start cost no later garbage collection."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from headrace_engine.serving.full_collections import limit_full_collections

class Node: pass
alive, lost = Node(), Node()
lost.itself = lost
del lost
limit_full_collections()
print(any(each is alive for each in gc.get_objects()), gc.get_freeze_count() > 1000)
print(any(isinstance(each, Node) and hasattr(each, "itself") for each in gc.get_objects()))
made = Node()
print(any(each is made for each in gc.get_objects()), gc.get_threshold()[2])
"""


def test_objects_of_the_start_are_frozen_its_garbage_freed_and_full_collections_rare() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "False", "True", "100"], done.stderr
