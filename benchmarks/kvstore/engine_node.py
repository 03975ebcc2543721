"""One vLLM engine in its own process, with the store or without: a program, see `child`."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

FIRST_TOKEN, LAST_TOKEN = 20, 49_000
"""Ids that SmolLM2 uses for plain text."""
SETTLE_S = 0.2


class Engine:
    """vLLM in this process, in float32, driven a step at a time.

    Args:
        store: the connector's `kv_connector_extra_config`; None for no connector.
    """

    def __init__(self, model: str, store: dict[str, Any] | None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = None
        if store is not None:
            transfer = KVTransferConfig(
                kv_connector="HeadraceConnector",
                kv_connector_module_path="headrace_engine.store_connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=store,
            )
        self._llm = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=8192,
            enable_prefix_caching=True,
            kv_transfer_config=transfer,
        )
        self._engine = self._llm.llm_engine
        self._numbers = itertools.count()
        self._slow: SlowCache | None = None
        if store is not None:
            scheduler = self._engine.engine_core.engine_core.scheduler
            self._half = scheduler.connector._scheduler

    def first_token(self, tokens: int, seed: int, tail: int = 0, tail_seed: int = 0) -> Any:
        """Return [seconds to the first token, prompt tokens found in the store] of one prompt.

        Args:
            tokens, seed: length and random seed of the prompt.
            tail, tail_seed: number and random seed of the tokens after it.
        """
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the engine's own prefix cache was not reset")
        prompt = noise(tokens, seed) + noise(tail, tail_seed)
        began = time.perf_counter()
        name = self._add(prompt, 1)
        first_s, cached = 0.0, 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.request_id == name and not first_s:
                    first_s = time.perf_counter() - began
                    cached = output.num_cached_tokens or 0
        return [first_s, cached]

    def settle(self) -> None:
        """Let saves come to their end: an engine without requests does not step."""
        for _ in range(5):
            self.decode(16, 4)
            time.sleep(SETTLE_S)

    def decode(self, prompt: int, tokens: int) -> list[float]:
        """Return the seconds from token to token of one running request, but for the first two."""
        self._add(noise(prompt, next(self._numbers)), tokens)
        times_s = []
        while self._engine.has_unfinished_requests():
            if self._engine.step():
                times_s.append(time.perf_counter())
        return [b - a for a, b in pairwise(times_s)][2:]

    def itl(self, cycles: int, gaps: int, prompt: int, seed: int) -> dict[str, list[list[float]]]:
        """Gaps between the tokens of one running request while others come, are computed and saved.

        In each cycle one other request comes, asking for one token. Saving is on in every other
        cycle, as with `save` in the store's settings.

        Returns:
            For "on" and "off" the cycles' gaps, seconds; the first of each holds the prefill.
        """
        name = self._add(noise(16, seed), (cycles + 2) * gaps)
        found: dict[str, list[list[float]]] = {"on": [], "off": []}
        last_s = 0.0
        for cycle in range(-2, cycles):
            self._half._saves = cycle % 2 == 0
            self._add(noise(prompt, seed + 3 + cycle), 1)
            taken: list[float] = []
            while len(taken) < gaps:
                if not self._engine.has_unfinished_requests():
                    raise RuntimeError("the running request ended early")
                if any(output.request_id == name for output in self._engine.step()):
                    now_s = time.perf_counter()
                    taken.append(now_s - last_s)
                    last_s = now_s
            if cycle >= 0:
                found["on" if cycle % 2 == 0 else "off"].append(taken)
        self._half._saves = True
        self._engine.abort_request([name])
        return found

    def saving(self, on: bool) -> None:
        """Switch saving, as with `save` in the store's settings."""
        self._half._saves = on

    def slow(self, layer_s: float) -> float:
        """Make each layer's load so much slower from now on; seconds that loads took since."""
        if self._slow is None:
            worker = connector_worker()._worker
            self._slow = worker._cache = SlowCache(worker._cache)
        self._slow.layer_s, spent_s = layer_s, self._slow.spent_s
        self._slow.spent_s = 0.0
        return spent_s

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        name = f"request-{next(self._numbers)}"
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name


class SlowCache:
    """An engine's cache whose loads wait first: a tier with little bandwidth."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.layer_names = cache.layer_names
        self.save, self.fence, self.drain = cache.save, cache.fence, cache.drain
        self.load_clock, self.close = cache.load_clock, cache.close
        self.layer_s = self.spent_s = 0.0

    def start(self, layer: int, *arguments: np.ndarray) -> Callable[[], np.ndarray]:
        return partial(self.load, layer, *arguments)

    def load(self, layer: int, *arguments: np.ndarray) -> np.ndarray:
        began = time.perf_counter()
        time.sleep(self.layer_s)
        sums: np.ndarray = self._cache.load(layer, *arguments)
        self.spent_s += time.perf_counter() - began
        return sums


def connector_worker() -> Any:
    """Return the worker half's shell in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def noise(tokens: int, seed: int) -> list[int]:
    """Random token ids: hardly any prefix in common with another seed."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]


def main() -> None:
    from benchmarks.kvstore.child import serve

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--store", type=json.loads, default=None)
    args = parser.parse_args()
    serve(lambda: Engine(args.model, args.store))


if __name__ == "__main__":
    main()
