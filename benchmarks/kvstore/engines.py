"""Starting engines for the parts that need real ones, and the store that they share."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kvstore.child import Child
from benchmarks.kvstore.timing import CannotRun

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
}
MODEL = "smollm2-135m-instruct"


@contextlib.contextmanager
def store(dram_bytes: str = "1GiB", **settings: Any) -> Iterator[dict[str, Any]]:
    """A store's settings, whose arena is gone afterwards."""
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
