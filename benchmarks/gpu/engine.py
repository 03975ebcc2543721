"""vLLM on the card with the KV store, for the parts and for `tests/gpu`."""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

from benchmarks.gpu.models import model_arguments, prompt, the_model

SETTLE_S = 0.5


def store_connector(name: str, dram_bytes: str) -> dict[str, Any]:
    """Return the connector's settings for an engine with the store `name`, which loads all that it
    finds there, also if computing may be faster."""
    return {
        "kv_connector": "HeadraceConnector",
        "kv_connector_module_path": "headrace_engine.store_connector",
        "kv_connector_extra_config": {"name": name, "dram_bytes": dram_bytes, "priced": False},
    }


def make_llm(
    connector: dict[str, Any] | None, positions: int = 8192, memory: float = 0.8, **also: Any
) -> Any:
    """vLLM in this process, with its own graphs.

    Args:
        connector: what moves its KV; None: nothing does.
        positions: most tokens of a request.
        memory: share of the card's.
        also: vLLM's arguments.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if connector is not None:
        also["kv_transfer_config"] = KVTransferConfig(
            **connector, kv_role="kv_both", kv_load_failure_policy="recompute"
        )
    return LLM(
        the_model(),
        dtype="bfloat16",
        max_model_len=positions,
        gpu_memory_utilization=memory,
        **model_arguments(),
        **also,
    )


def settle(llm: Any) -> None:
    """Let the store save what was computed, then remove it from the engine's own prefix cache.

    Raises:
        RuntimeError: requests still hold blocks.
    """
    from vllm import SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    for _ in range(4):
        # Saves end in steps.
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], one, use_tqdm=False)
        time.sleep(SETTLE_S)
    if not llm.reset_prefix_cache():
        raise RuntimeError("the engine's own prefix cache was not reset")


class Engine:
    """vLLM in this process, driven a step at a time.

    Args:
        name, dram_bytes: of its store.
        positions: most tokens of a request.
    """

    def __init__(self, name: str, dram_bytes: str, positions: int) -> None:
        self._llm = make_llm(store_connector(name, dram_bytes), positions)
        self._engine = self._llm.llm_engine
        self.block_tokens = self._engine.vllm_config.cache_config.block_size

    def add(self, tokens: list[int], count: int) -> str:
        from vllm import SamplingParams

        name = uuid.uuid4().hex
        params = SamplingParams(
            max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": tokens}, params)
        return name

    def first_token_s(self, tokens: list[int]) -> tuple[float, int]:
        """Seconds, and how many of its tokens were found."""
        began_s, name, found, first_s = time.perf_counter(), self.add(tokens, 1), 0, 0.0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.request_id == name and not first_s:
                    first_s = time.perf_counter() - began_s
                    found = output.num_cached_tokens or 0
        return first_s, found

    def settle(self) -> None:
        """Leave the KV of earlier prompts in the store only."""
        settle(self._llm)

    def gaps_s(self, arrivals: list[list[int]], running: int, count: int) -> list[float]:
        """Return the gaps between the tokens of running requests while these prompts come, evenly
        spread.

        Args:
            running: number of running requests. count: gaps of each.
        """
        names = {self.add(prompt(64, 10_000 + n), count + 1) for n in range(running)}
        last: dict[str, float] = {}
        gaps: list[float] = []
        steps, every = 0, max(1, count // (len(arrivals) + 1))
        waiting = list(arrivals)
        while self._engine.has_unfinished_requests():
            outputs, now_s = self._engine.step(), time.perf_counter()
            for output in outputs:
                if output.request_id in names:
                    if output.request_id in last:
                        gaps.append(now_s - last[output.request_id])
                    last[output.request_id] = now_s
            steps += 1
            if waiting and steps % every == 0:
                self.add(waiting.pop(), 1)
        return gaps
