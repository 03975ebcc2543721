"""Programs of `tests.support` that run vLLM engines: the engines leave with the program's process.

A program tells what it found with `say`, and `forked.told` reads that.
"""

from __future__ import annotations

import json
import multiprocessing.context
import os
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]
IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def engine_environment(**more: str) -> dict[str, str]:
    """This process's, for a small engine on one core that compiles nothing, of this tree."""
    parts = ("platform", "prefill", "decode", "engine", "kvstore", "lab")
    folders = [str(ROOT), *(str(ROOT / part) for part in parts)]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])]),
        **more,
    }


def fork_what_would_be_spawned() -> None:
    """Have this program fork vLLM's workers and engine cores, as vLLM does but on CPUs, where each
    would import it again."""
    contexts: dict[str, Any] = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]


def say(found: Any, to: TextIO | None = None) -> None:
    """To whoever runs this program, or to a stream of its own."""
    print(json.dumps({"said": found}), file=to, flush=True)
