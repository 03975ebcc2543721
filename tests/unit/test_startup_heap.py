"""Objects of a server's start cost no later garbage collection."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from headrace_engine.serving.startup_heap import freeze_startup_heap

class Node: pass
alive, lost = Node(), Node()
lost.itself = lost
del lost
freeze_startup_heap()
print(any(each is alive for each in gc.get_objects()), gc.get_freeze_count() > 1000)
print(any(isinstance(each, Node) and hasattr(each, "itself") for each in gc.get_objects()))
made = Node()
print(any(each is made for each in gc.get_objects()))
"""


def test_objects_of_the_start_are_frozen_its_garbage_freed_and_later_objects_collected() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "False", "True"], done.stderr
