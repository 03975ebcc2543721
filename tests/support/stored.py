"""One vLLM engine in its own process, plain or with a KV store: a truth to compare with, or a test.

Driven by JSON lines, as `benchmarks.kvstore.child` says.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.kvstore.child import Child, serve
from headrace_engine.kv_transfer.handoff import PARAMS_KEY, produce_params, pull_params
from tests.support import run
from tests.support.connectors import (
    beside,
    blending_connector,
    checked_nixl_connector,
    side_channel,
    store_connector,
)
from tests.support.forked import Forked
from tests.support.kvnode import SlowMover
from tests.support.program import (
    IN_ONE_PROCESS,
    engine_environment,
    fork_what_would_be_spawned,
)
from tests.support.prompts import FIRST_TOKEN

FORGET_S = 30.0


@dataclass(frozen=True)
class Stored:
    """One answer: token ids, their log-probabilities, and prompt tokens found in a cache."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


class StoredEngine:
    """An engine that starts now and is there once `ready` returns.

    Args:
        model: its folder.
        store: the connector's `kv_connector_extra_config`; None for an engine without a store.
        prefix_caching: whether the engine keeps a prompt's KV for the next one, store or not.
        ranks: tensor-parallel workers; several are processes of their own, in which `slow_disk`
            changes nothing.
        hands_over: whether it hands KV to other engines over NIXL, and pulls theirs.
        blends: whether it also reuses the store's KV at other places.
        more: of the engine's arguments.
    """

    def __init__(
        self,
        model: str,
        store: dict[str, Any] | None,
        prefix_caching: bool = True,
        ranks: int = 1,
        hands_over: bool = False,
        blends: bool = False,
        **more: Any,
    ) -> None:
        self._folder = TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        environment = engine_environment(**IN_ONE_PROCESS)
        if hands_over:
            environment |= side_channel(ranks)
        options = {
            "model": model,
            "store": json.dumps(store),
            "prefix_caching": int(prefix_caching),
            "ranks": ranks,
            "hands_over": int(hands_over),
            "blends": int(blends),
            "more": json.dumps(more),
        }
        run.engine_started()
        self._child = Child("stored", options, environment, self._log, "tests.support.", Forked)

    def ready(self) -> StoredEngine:
        """Wait until it has started. Raises RuntimeError with the end of its log."""
        self._child.answer()
        return self

    def answers(
        self,
        prompts: Sequence[list[int]],
        salts: Sequence[str | None] | None = None,
        *,
        max_tokens: int = 8,
        together: bool = False,
        anew: bool = False,
        adapter: tuple[int, str] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> list[Stored]:
        """Greedy answers to prompts of token ids, one after the other, or all at once.

        Args:
            salts: a cache salt a prompt.
            anew: the engine forgets its own prefix cache first.
            adapter: number and folder of a LoRA adapter; its name is that of the folder.
            extra: extra arguments of each request.
        """
        task: dict[str, Any] = {"max_tokens": max_tokens, "together": together, "anew": anew}
        self.ask(prompts, salts, **task, adapter=adapter, extra=extra)
        return self.answer()

    def ask(
        self,
        prompts: Sequence[list[int]],
        salts: Sequence[str | None] | None = None,
        *,
        max_tokens: int = 8,
        together: bool = False,
        anew: bool = False,
        adapter: tuple[int, str] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """As `answers`, without waiting for them: `answer` does."""
        task = {"prompts": prompts, "salts": salts, "max_tokens": max_tokens, "extra": extra}
        self._child.ask("answers", **task, together=together, anew=anew, adapter=adapter)

    def answer(self) -> list[Stored]:
        """What was asked for last. Raises RuntimeError if the engine failed or is gone."""
        return [Stored(**answer) for answer in self._child.answer()]

    def unsupported(self) -> dict[str, str]:
        """The techniques that any of its ranks cannot do, and why."""
        return dict(self._child.do("unsupported"))

    def digests(self, prompt: list[int]) -> list[list[int]]:
        """The hashes of a prompt's full blocks, each as numbers of a byte."""
        return list(self._child.do("digests", prompt=prompt))

    def block_tokens(self) -> int:
        """Tokens of a block: vLLM makes blocks longer for a model with recurrent layers."""
        return int(self._child.do("block_tokens"))

    def abort(self, prompts: Sequence[list[int]], steps: int) -> None:
        """Ask for answers to prompts, all at once, and abort them after so many steps."""
        self._child.do("abort", prompts=prompts, steps=steps)

    def retain(self, prompt: list[int], seconds: float) -> None:
        """Compute a prompt with the hint that its KV is retained."""
        self._child.do("retain", prompt=prompt, seconds=seconds)

    def preemptions(self) -> int:
        """Number of preemptions so far."""
        return int(self._child.do("preemptions"))

    def held_blocks(self) -> int:
        """Number of blocks that are held although there are no requests, after a while."""
        return int(self._child.do("held_blocks"))

    def prefill(self, prompt: list[int], salt: str) -> dict[str, Any]:
        """Compute a prompt and keep its KV; with what another engine pulls it."""
        return dict(self._child.do("prefill", prompt=prompt, salt=salt))

    def pull(self, prompt: list[int], salt: str, parameters: dict[str, Any]) -> Stored:
        """The answer to a prompt whose KV another engine keeps."""
        return Stored(**self._child.do("pull", prompt=prompt, salt=salt, parameters=parameters))

    def transfers(self) -> Counter[str]:
        """Pulls by what became of them (`pull_proof.stats`)."""
        return Counter(self._child.do("transfers"))

    def events(self) -> Counter[str]:
        """Blocks by what became of them, as vLLM exports it (`connector.stats`)."""
        return Counter(self._child.do("events"))

    def hold(self) -> None:
        """From now on the last rank stops before each save, and in the middle of each load."""
        self._child.do("hold")

    def slow_disk(self, bytes_per_s: float | None) -> None:
        """Read files no faster than this from now on; None as fast as they are."""
        self._child.do("slow_disk", bytes_per_s=bytes_per_s)

    def load_ahead(self, always: bool) -> None:
        """From now on make each load ahead of its step; or as predicted seconds say."""
        self._child.do("load_ahead", always=always)

    def maps_removed(self, name: str) -> bool:
        """Whether it still maps a removed file of this name."""
        lines = Path(f"/proc/{self._child._process.pid}/maps").read_text().splitlines()
        return any(f"/{name} (deleted)" in line for line in lines)

    def update_weights(self) -> None:
        """Give the model other embeddings in place, and reset all caches."""
        self._child.do("update_weights")

    def kill(self) -> None:
        """With -9."""
        self._child.kill()

    def end(self) -> None:
        """Have it end as engines do."""
        self._child.end()
        self._folder.cleanup()


def stored_answers(
    model: str,
    prompts: list[list[int]],
    store: dict[str, Any] | None,
    *,
    salts: list[str | None] | None = None,
    max_tokens: int = 8,
    prefix_caching: bool = True,
) -> list[Stored]:
    """Answers of an engine that is there for these only.

    Raises:
        RuntimeError: the engine failed; with the end of its log.
    """
    engine = StoredEngine(model, store, prefix_caching)
    try:
        return engine.ready().answers(prompts, salts, max_tokens=max_tokens)
    finally:
        engine.end()


class Engine:
    """The engine's own process."""

    def __init__(
        self,
        model: str,
        store: dict[str, Any] | None,
        prefix_caching: bool,
        ranks: int,
        hands_over: bool,
        blends: bool,
        more: dict[str, Any],
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

        from headrace_engine.connector.loading import file_loader as files

        files.FileIo = SlowMover  # type: ignore[misc]
        if ranks > 1:
            fork_what_would_be_spawned()
        transfer = None
        self._stores = store is not None
        if store is not None:
            connectors = [store_connector(store)]
            if hands_over:
                connectors.insert(0, checked_nixl_connector())
            if blends:
                connectors.append(blending_connector(store))
            if len(connectors) > 1:
                # MultiConnector takes statistics for mappings, as they are between two processes.
                KVConnectorStats.__getitem__ = lambda stats, name: getattr(stats, name)
            connector = beside(*connectors) if len(connectors) > 1 else connectors[0]
            transfer = KVTransferConfig(**connector)
        usual = {"dtype": "float32", "enforce_eager": True, "max_model_len": 8192}
        self._llm = LLM(
            model,
            **(usual | more),
            enable_prefix_caching=prefix_caching,
            disable_log_stats=False,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp" if ranks > 1 else None,
            kv_transfer_config=transfer,
        )

    def answers(
        self,
        prompts: list[list[int]],
        salts: list[str | None] | None = None,
        max_tokens: int = 8,
        together: bool = False,
        anew: bool = False,
        adapter: tuple[int, str] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        if anew:
            self._forget()
        inputs: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in prompts]
        for given, salt in zip(inputs, salts or [], strict=bool(salts)):
            if salt is not None:
                given["cache_salt"] = salt
        turns = [inputs] if together else [[given] for given in inputs]
        told = [self._turn(turn, max_tokens, extra=extra, adapter=adapter)[0] for turn in turns]
        return [answer for answers in told for answer in answers]

    def unsupported(self) -> dict[str, str]:
        told = self._llm.collective_rpc("headrace_unsupported")
        return {name: why for each in told for name, why in each.items()}

    def digests(self, prompt: list[int]) -> list[list[int]]:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        hasher = self._llm.llm_engine.engine_core.engine_core.request_block_hasher
        params = SamplingParams(max_tokens=1)
        made = Request("hashed", prompt, params, None, block_hasher=hasher)
        return [list(bytes(each)[:32]) for each in made.block_hashes]

    def block_tokens(self) -> int:
        return int(self._llm.llm_engine.vllm_config.cache_config.block_size)

    def abort(self, prompts: list[list[int]], steps: int) -> None:
        from vllm import SamplingParams

        engine, names = self._llm.llm_engine, [f"aborted-{n}" for n in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        for _ in range(steps):
            engine.step()
        engine.abort_request(names)
        engine.step()

    def retain(self, prompt: list[int], seconds: float) -> None:
        from vllm import SamplingParams

        from headrace_engine.vllm.llm import with_retention

        engine, name = self._llm.llm_engine, "retained"
        params = SamplingParams(max_tokens=1, temperature=0.0)
        given: Any = {"prompt_token_ids": prompt}
        engine.add_request(name, given, params, **with_retention({}, seconds, name))
        while engine.has_unfinished_requests():
            engine.step()

    def preemptions(self) -> float:
        found = self._llm.get_metrics()
        return sum(m.value for m in found if m.name == "vllm:num_preemptions")

    def held_blocks(self) -> int:
        pool = self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        deadline = time.monotonic() + FORGET_S
        while (held := len(pool.blocks) - 1 - pool.get_num_free_blocks()) and (
            time.monotonic() < deadline
        ):
            self._turn([{"prompt_token_ids": [FIRST_TOKEN]}], 1)
            time.sleep(0.01)
        return int(held)

    def prefill(self, prompt: list[int], salt: str) -> Any:
        given = {"prompt_token_ids": prompt, "cache_salt": salt}
        return self._turn([given], 1, {PARAMS_KEY: pull_params(produce_params())})[1]

    def pull(self, prompt: list[int], salt: str, parameters: dict[str, Any]) -> dict[str, Any]:
        given = {"prompt_token_ids": prompt, "cache_salt": salt}
        [answer] = self._turn([given], 8, {PARAMS_KEY: pull_params(parameters)})[0]
        return answer

    def update_weights(self) -> None:
        self._llm.collective_rpc(_flip)
        self._forget(reset_connector=self._stores)

    def _forget(self, **more: bool) -> None:
        """Empty the prefix cache. Blocks that are being saved are given back in a later step."""
        deadline = time.monotonic() + FORGET_S
        while not self._llm.reset_prefix_cache(**more):
            assert time.monotonic() < deadline, "blocks are never given back"
            self._turn([{"prompt_token_ids": [FIRST_TOKEN]}], 1)
            time.sleep(0.01)

    def _turn(
        self,
        inputs: list[dict[str, Any]],
        max_tokens: int,
        extra: dict[str, Any] | None = None,
        adapter: tuple[int, str] | None = None,
    ) -> tuple[list[dict[str, Any]], Any]:
        """Answers, and how the last one's KV is pulled."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        lora = adapter and LoRARequest(Path(adapter[1]).name, *adapter)
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, logprobs=0, extra_args=extra
        )
        answers, transfer = [], None
        for result in self._llm.generate(inputs, params, use_tqdm=False, lora_request=lora):
            [output] = result.outputs
            assert output.logprobs is not None
            logprobs = [
                step[token].logprob
                for step, token in zip(output.logprobs, output.token_ids, strict=True)
            ]
            answers.append(
                {
                    "tokens": list(output.token_ids),
                    "logprobs": logprobs,
                    "cached": result.num_cached_tokens,
                }
            )
            transfer = result.kv_transfer_params
        return answers, transfer

    def events(self) -> dict[str, float]:
        from headrace_engine.connector.stats import COUNTER

        found = [metric for metric in self._llm.get_metrics() if metric.name == COUNTER]
        return {metric.labels["event"]: metric.value for metric in found}

    def transfers(self) -> dict[str, float]:
        found = [m for m in self._llm.get_metrics() if m.name == "vllm:headrace_transfers"]
        return {metric.labels["event"]: metric.value for metric in found}

    def hold(self) -> None:
        self._llm.collective_rpc(_hold)

    def slow_disk(self, bytes_per_s: float | None) -> None:
        SlowMover.bytes_per_s = bytes_per_s

    def load_ahead(self, always: bool) -> None:
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        price = scheduler.connector._price
        if always:
            price.ahead = lambda *_: True
        else:
            del price.ahead

    def close(self) -> None:
        time.sleep(0.5)  # for saves under way
        self._llm.llm_engine.engine_core.shutdown()


def _flip(worker: Any) -> None:
    embeddings = worker.model_runner.get_model().model.embed_tokens.weight.data
    embeddings.copy_(embeddings.flip(0).clone())


def _hold(worker: Any) -> None:
    """`StoredEngine.hold`, in a rank's process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    parallel = worker.vllm_config.parallel_config
    if parallel.rank != parallel.world_size - 1:
        return
    connector = get_kv_transfer_group()
    if hasattr(connector, "_connectors"):
        connector = connector._connectors[-1]
    cache, parent = connector._worker._cache, os.getppid()
    load = cache.load

    def stop(*_: Any) -> Any:
        while os.getppid() == parent:
            time.sleep(0.02)
        os._exit(1)  # or a rank would outlive an engine that was killed

    def load_half(layer: int, *arguments: Any) -> Any:
        return stop() if layer == len(cache.layer_names) // 2 else load(layer, *arguments)

    cache.load, cache.save = load_half, stop


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--store", type=json.loads, required=True)
    parser.add_argument("--prefix-caching", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--hands-over", type=int, required=True)
    parser.add_argument("--blends", type=int, required=True)
    parser.add_argument("--more", type=json.loads, required=True)
    args = parser.parse_args()
    flags = bool(args.prefix_caching), args.ranks, bool(args.hands_over), bool(args.blends)
    serve(lambda: Engine(args.model, args.store, *flags, args.more))


if __name__ == "__main__":
    main()
