"""Lets KV come late, or not at all, in the engines of an app that is started to be broken.

Python imports a module of this name when it starts, if its folder is on PYTHONPATH. Here it waits
for the class that pulls KV, and has each pull do what a file says at that moment: `late SECONDS`,
`fail`, or anything else for nothing. Each pull that it hits adds a line to a second file. Processes
without the two environment variables are left alone (`benchmarks.chaos.kv_faults` sets them).
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ORDER, HIT = "CHAOS_KV_ORDER", "CHAOS_KV_HIT"
"""Environment variables: the file that says what happens to pulls, and the one that counts them."""
PULLS = "headrace_engine.pull_proof.worker_connector"


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook that finds the module that pulls KV as usual, and patches it after loading."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != PULLS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is None:
            return spec
        plain = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            plain(module)
            _change(module)

        loader.exec_module = exec_module
        return spec


def _change(module: Any) -> None:
    worker, unproved = module.ProvenWorker, module.Unproved
    read, finished = worker._read_blocks_for_req, worker.get_finished

    def _read_blocks_for_req(self: Any, req_id: str, meta: Any) -> None:
        order = _order()
        if order[:1] == ["late"]:
            _hit(order)
            self.__dict__.setdefault("chaos_held", []).append(
                (time.monotonic() + float(order[1]), req_id, meta)
            )
        elif order[:1] == ["fail"]:
            _hit(order)
            self._refuse(req_id, unproved("unreachable", "the benchmark has this pull fail"))
        else:
            read(self, req_id, meta)

    def get_finished(self: Any) -> Any:
        held = self.__dict__.get("chaos_held", [])
        now_s = time.monotonic()
        while held and held[0][0] <= now_s:
            _, req_id, meta = held.pop(0)
            read(self, req_id, meta)
        return finished(self)

    worker._read_blocks_for_req, worker.get_finished = _read_blocks_for_req, get_finished


def _order() -> list[str]:
    with contextlib.suppress(OSError):
        return Path(os.environ[ORDER]).read_text().split()
    return []


def _hit(order: list[str]) -> None:
    with contextlib.suppress(OSError), open(os.environ[HIT], "a") as file:
        file.write(" ".join(order) + "\n")


if ORDER in os.environ and HIT in os.environ:
    sys.meta_path.insert(0, _Finder())
