"""Starting engines for the parts that need real ones, and the store that they share."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kvstore.child import ROOT, Child, stop
from benchmarks.kvstore.timing import CannotRun

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
}
MODEL = "smollm2-135m-instruct"
NODE_START_S = 30.0
DISK_FOLDER = Path(os.environ.get("TMPDIR", "/var/tmp"))


@contextlib.contextmanager
def store(dram_bytes: str = "1GiB", **settings: Any) -> Iterator[dict[str, Any]]:
    """Yield a store's settings; remove its arena afterwards."""
    name = f"headrace-bench-{uuid.uuid4().hex[:12]}"
    try:
        yield {"name": name, "dram_bytes": dram_bytes, **settings}
    finally:
        (Path("/dev/shm") / name).unlink(missing_ok=True)


@contextlib.contextmanager
def engines(*stores: dict[str, Any] | None) -> Iterator[Sequence[Child]]:
    """Engines, one for each of these settings (None: without a connector), started together.

    Raises:
        CannotRun: vLLM or the model is not there, or an engine does not start.
    """
    try:
        import vllm  # noqa: F401

        from headrace.model import resolve

        model = resolve(MODEL)
    except Exception as error:
        raise CannotRun(f"no engine: {error}") from error
    started: list[Child] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, settings in enumerate(stores):
                options = {"model": model}
                if settings is not None:
                    options["store"] = json.dumps(settings)
                log = Path(folder) / f"engine-{number}"
                environment = {**os.environ, **ENVIRONMENT}
                started.append(Child("engine_node", options, environment, log))
            for engine in started:
                try:
                    engine.answer()
                except RuntimeError as error:
                    raise CannotRun(f"an engine does not start: {error}") from error
            yield started
        finally:
            for engine in started:
                engine.end()


@contextlib.contextmanager
def node(store: dict[str, Any], nvme_bytes: str | None = "4GiB") -> Iterator[NodeTool]:
    """A StoreNode in a process of its own, over this store's arena and a folder on disk.

    Args:
        nvme_bytes: of the NVMe tier; None for none.

    Raises:
        CannotRun: it does not start, or has no NVMe tier.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=DISK_FOLDER) as folder:
        settings = {**store, "keep_arena": True}
        if nvme_bytes is not None:
            settings |= {"nvme_folder": folder, "nvme_bytes": nvme_bytes}
        command = [sys.executable, "-m", "headrace_kvstore", "node"]
        command += [f"--set={name}={value}" for name, value in settings.items()]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            tool = NodeTool(store["name"])
            tool.wait_for(
                lambda stats: nvme_bytes is None or stats["tiers"]["nvme"]["state"] == "on",
                NODE_START_S,
            )
            yield tool
        finally:
            stop(process)


class NodeTool:
    """Asks a StoreNode."""

    def __init__(self, name: str) -> None:
        self._name = name

    def stats(self) -> dict[str, Any]:
        """Return `StoreNode.stats`; empty while the node does not answer."""
        from headrace_kvstore.protocol import wire
        from headrace_kvstore.protocol.client import call

        with contextlib.suppress(TimeoutError):
            reply = call(self._name, wire.GetStats(), 1.0)
            if isinstance(reply, wire.Stats):
                return reply.values
        return {}

    def forget_dram(self) -> None:
        """Drop everything from the arena."""
        from headrace_kvstore.arena.arena import Arena

        with Arena.create_or_attach(self._name, 1 << 30) as arena:
            arena.clear()

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float) -> None:
        """Until the node's stats are so. Raises CannotRun if they never are."""
        deadline = time.monotonic() + timeout_s
        while True:
            stats = self.stats()
            if stats and condition(stats):
                return
            if time.monotonic() > deadline:
                raise CannotRun(f"the store node does not get there: {stats or 'no answer'}")
            time.sleep(0.1)
