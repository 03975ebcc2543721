"""The engines and their arms: who takes turns with whom, and with which settings."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kvstore.child import Child
from benchmarks.kvstore.timing import CannotRun
from benchmarks.packages import install
from headrace_decode.speculative.settings import engine_arguments

DRAFT_TOKENS = 16
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # vLLM's ngram proposer sets torch's threads to this after each step
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "none",
    "TORCH_COMPILE_DISABLE": "1",
}
MODEL = "smollm2-135m-instruct"
ARCTIC = ("arctic", "arctic-inference", "0.3.0", "arctic_inference")
"""Arctic Inference, for vLLM's method `suffix`, as `install` takes it."""
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "headrace": engine_arguments(DRAFT_TOKENS),
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    },
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": DRAFT_TOKENS}},
}
STEP_TOKENS_MAX = 512
"""Static arms that would verify more than this in a step are left out: they lose by far."""


def static_lengths(workload: str, concurrency: int) -> list[int]:
    """Draft lengths of the static arms."""
    if workload == "undraftable":
        return [1, 4] if 5 * concurrency <= STEP_TOKENS_MAX else [1]
    lengths = (1, 2, 4, 8) if concurrency >= 32 else (2, 4, 8, 16)
    return [k for k in lengths if concurrency * (1 + k) <= STEP_TOKENS_MAX]


def arms_of(engine: str, workload: str, concurrency: int) -> dict[str, str | None]:
    """The arms that this engine runs: name -> the planner's mode, None where there is none."""
    if engine != "headrace":
        return {engine: None}
    static = {f"static{k}": f"static:{k}" for k in static_lengths(workload, concurrency)}
    return {"off": "off", "auto": "auto", **static}


@contextlib.contextmanager
def engines(names: Sequence[str], dtype: str) -> Iterator[Mapping[str, Child]]:
    """These engines, each in a process of its own, started together; idle unless asked.

    Raises:
        CannotRun: vLLM or the model is not there, or an engine does not start.
    """
    try:
        import vllm  # noqa: F401

        from headrace.model import resolve

        model = resolve(MODEL)
    except Exception as error:
        raise CannotRun(f"no engine: {error}") from error
    started: dict[str, Child] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                environment = {**os.environ, **ENVIRONMENT}
                if name == "suffix":
                    paths = [str(install(*ARCTIC)), environment.get("PYTHONPATH", "")]
                    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
                options = {
                    "model": model,
                    "engine": json.dumps({"dtype": dtype, **ENGINES[name]}),
                }
                log = Path(folder) / name
                package = "benchmarks.speculation."
                started[name] = Child("engine_node", options, environment, log, package)
            for name, engine in started.items():
                try:
                    engine.answer()
                except RuntimeError as error:
                    raise CannotRun(f"{name} does not start: {error}") from error
            yield started
        finally:
            for engine in started.values():
                engine.end()
