"""SmolLM2 in bfloat16 on one thread in a vLLM engine in this process, attending sparsely for those
requests that ask."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_decode.attention.settings import SparseSettings
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_engine.extensions.extension import EXTENSIBLE_WORKER

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Environment of the process from its start: on import, torch reads the number of threads in it."""
LONGEST = 8192


def report(about: str, measured: Callable[..., Mapping[str, float]], *files: str) -> None:
    """Run a benchmark of one thread as a main function: measure, write and print.

    Args:
        about: the program's docstring. measured: makes its figures.
        files: options that name files; `measured` gets them by name, None where not given.
    """
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    for name in files:
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    options = parser.parse_args()
    _begin_in_environment()
    figures = measured(**{name: getattr(options, name) for name in files})
    found = {"figures": {name: round(value, 4) for name, value in figures.items()}}
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def _begin_in_environment() -> None:
    """Restart this program in `ENVIRONMENT`, unless it has it."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **ENVIRONMENT})


@dataclass(frozen=True)
class Step:
    """One step of the engine.

    Attributes:
        seconds: that it took.
        sparse: rows that attended sparsely.
        outputs: vLLM's, by request: what its answer grew by.
    """

    seconds: float
    sparse: int
    outputs: Mapping[str, Any]


class Engine:
    """
    Args:
        settings: of sparse attention, and of bounded contexts.
        options: of vLLM's `LLM`, beside those that all benchmarks have.
    """

    def __init__(self, *settings: SparseSettings | CompressionSettings, **options: Any) -> None:
        from vllm import LLM

        from headrace.model import resolve
        from headrace_decode.attention_backend.runtime import RUNTIME

        self.llm: Any = LLM(
            str(resolve(None)),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=LONGEST,
            additional_config=dict(ChainMap(*(each.additional_config() for each in settings))),
            worker_cls=EXTENSIBLE_WORKER,
            **options,
        )
        self.bound, self._named = RUNTIME, 0

    def prompts(self, tokens: int, count: int = 1) -> list[list[int]]:
        """Documents of installed packages, one after another."""
        from headrace_lab.texts.prompts import documents

        tokenizer = self.llm.get_tokenizer()
        ids: list[int] = []
        for file in documents(True):
            ids += tokenizer(file.read_text("utf-8", errors="replace")).input_ids
            if len(ids) >= count * tokens:
                break
        return [ids[n * tokens : (n + 1) * tokens] for n in range(count)]

    def add(
        self,
        prompt: list[int],
        answer: int,
        share: float | None,
        salt: str = "",
        technique: str = "sparse",
        arrives: bool = False,
        **options: Any,
    ) -> str:
        """Add a request for a greedy answer of so many tokens; its name.

        Args:
            share: of pages, or of the context that is kept; None for an exact request.
            salt: of its KV.
            technique: that the share is for.
            arrives: its KV is in the cache as a whole first, as if it came from another engine.
            options: of `SamplingParams`.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra: dict[str, Any] = {} if share is None else {technique: share}
        if arrives:
            extra["kv_transfer_params"] = {"remote": "another engine"}
        params = SamplingParams(
            max_tokens=answer,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra or None,
            **options,
        )
        told = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        self._named += 1
        self.llm.llm_engine.add_request(name := str(self._named), told, params)
        return name

    def steps(self) -> Iterator[Step]:
        """Step until no request is left."""
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            begun, before = time.perf_counter(), self._sparse_rows()
            outputs = engine.step()
            took = time.perf_counter() - begun
            found = {output.request_id: output.outputs[0] for output in outputs}
            yield Step(took, self._sparse_rows() - before, found)

    def _sparse_rows(self) -> int:
        offloading = self.bound.offloading
        return int(self.bound.sparse_row_count + (0 if offloading is None else offloading.sparse))


def same_first(a: list[int], b: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(a, b, strict=True)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), len(a))
