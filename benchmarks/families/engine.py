"""vLLM engines in one process, one after another: a program, see `benchmarks.kvstore.child`.

An engine is plain, or has Headrace's connectors and extensions, as in the decode server.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from typing import Any

from benchmarks.families.cases import FIRST_TOKEN
from benchmarks.kvstore.child import serve

PATIENCE_S, IDLE_PATIENCE_S = 900.0, 60.0
"""Longest wait for answers, and for an engine without requests to give its blocks back."""
AT_ONCE = 128
"""Requests that an engine computes at once."""
CHANNELS = "vllm:headrace_kv_blocks", "vllm:headrace_transfers"
"""Counters by `event`."""
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
SOURCES = "vllm:prompt_tokens_by_source"


def engine_config(model: str, arguments: dict[str, Any]) -> Any:
    """Return vLLM's configuration of an engine."""
    from vllm.engine.arg_utils import EngineArgs

    usual = {"enforce_eager": True, "skip_tokenizer_init": True, "disable_log_stats": False}
    return EngineArgs(model, **usual, **arguments).create_engine_config()


class Engines:
    """An engine, and then the next one."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._numbers = itertools.count()

    def open(
        self,
        model: str,
        dtype: str,
        options: dict[str, Any],
        transfer: dict[str, Any] | None = None,
        extensions: bool = True,
    ) -> dict[str, Any]:
        """Start an engine in place of the one before.

        Args:
            options: of vLLM's.
            transfer: `kv_transfer_config`; None for no connector.
            extensions: whether it runs Headrace's extensions.

        Returns:
            Facts: `block` in tokens, `layers` of a stored block and its `block_bytes`, `groups` of
            the cache, `no_store` and `no_prefix_cache`: why there is none; `lora`: whether vLLM's
            class takes adapters; and the techniques that are `unsupported`, with the reasons.
            Only `no_drafts`, if it is asked to draft and a replica would not let it; it does not
            start then.
        """
        from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
        from vllm.model_executor.models.interfaces import supports_lora
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.kv_cache_interface import MambaSpec, get_kv_cache_spec_kind

        from headrace_decode.llm.engine_classes import choose_engine_classes
        from headrace_engine.vllm.kv_cache import iter_layer_specs
        from headrace_engine.vllm.platforms import cpu_arguments, why_no_prefix_cache
        from headrace_engine.vllm.recurrent_models import leave_out_store, why_no_speculation

        self.close()
        # MultiConnector takes statistics for mappings, as they are between two processes.
        KVConnectorStats.__getitem__ = lambda stats, name: getattr(stats, name)
        arguments = {"max_num_batched_tokens": 2048, "max_num_seqs": AT_ONCE, **options}
        arguments |= {"dtype": dtype, "kv_transfer_config": transfer}
        config = engine_config(model, arguments)
        if changed := cpu_arguments(config):
            config = engine_config(model, arguments | changed)
        if extensions and (why := why_no_speculation(config)) is not None:
            return {"no_drafts": why}
        no_store = leave_out_store(config)
        if extensions and (why := choose_engine_classes(config)) is not None:
            raise RuntimeError(why)
        self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=False)
        self._core = self._engine.engine_core.engine_core
        self._free = self._free_blocks()
        groups = self._core.scheduler.kv_cache_config.kv_cache_groups
        specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
        [lora] = self._engine.apply_model(supports_lora)
        unsupported: dict[str, str] = {}
        if extensions:
            for told in self._engine.collective_rpc("headrace_unsupported"):
                unsupported |= told
        counts = [len(group.layer_names) for group in groups]
        has_states = any(isinstance(spec, MambaSpec) for spec in specs)
        layers = max(counts) if has_states else sum(counts)
        return {
            "block": config.cache_config.block_size,
            "layers": layers,
            "block_bytes": layers * specs[0].page_size_bytes,
            "groups": [get_kv_cache_spec_kind(g.kv_cache_spec).value for g in groups],
            "no_store": no_store,
            "no_prefix_cache": why_no_prefix_cache(config),
            "lora": bool(lora),
            "unsupported": unsupported,
        }

    def ask(
        self,
        prompts: list[list[int]],
        salt: str,
        max_tokens: int,
        transfers: list[dict[str, Any]] | None = None,
        earlier: list[list[int]] | None = None,
        logprobs: int = 0,
    ) -> dict[str, Any]:
        """Return the greedy answers to prompts, all at once.

        Args:
            salt: of their blocks.
            transfers: for each prompt, `produce_params()`, or what another engine said of its KV.
            earlier: for each prompt, the tokens of its answer that another engine gave.
            logprobs: how many of the best tokens to name.

        Returns:
            `answers` of [tokens, logprobs, leads], `transfers`, `local` and `external` hits in
            tokens, `events` by which counters rose, and `seconds`.
        """
        before, began = self._counters(), time.perf_counter()
        names = self._start(prompts, salt, max_tokens, transfers, earlier, logprobs)
        done = {name: _Output() for name in names}
        while self._engine.has_unfinished_requests():
            self._step(done)
            if time.perf_counter() - began > PATIENCE_S:
                raise RuntimeError("the engine did not answer in time")
        seconds, rose = time.perf_counter() - began, self._counters() - before
        short = [name for name in names if not done[name].finished]
        if short:
            raise RuntimeError(f"{len(short)} requests ended without an answer")
        return {
            "answers": [done[name].answer for name in names],
            "transfers": [done[name].transfer for name in names],
            "local": rose.pop("local_cache_hit", 0),
            "external": rose.pop("external_kv_transfer", 0),
            "events": {name: n for name, n in rose.items() if n},
            "seconds": seconds,
        }

    def begin(
        self, prompts: list[list[int]], salt: str, max_tokens: int, at_least: int
    ) -> list[str]:
        """Answer prompts until each answer has so many tokens, and leave them in flight.

        Returns:
            For each prompt the lines that a decode replica puts into its stream
            (`headrace_decode.resume.emitted`).
        """
        names = self._start(prompts, salt, max_tokens)
        done = {name: _Output() for name in names}
        while min(len(each.tokens) for each in done.values()) < at_least:
            self._step(done)
        return [done[name].lines for name in names]

    def forget(self) -> None:
        """Empty the engine's prefix cache, once its blocks are saved."""
        self._until(self._engine.reset_prefix_cache, "blocks are never given back")

    def settle(self) -> int:
        """Wait until all requests have given their blocks back; return how many are still held."""
        try:
            self._until(lambda: self._free_blocks() == self._free, "")
        except RuntimeError:
            return int(self._free - self._free_blocks())
        return 0

    def close(self) -> None:
        """End the engine."""
        if self._engine is None:
            return
        import gc

        from vllm.distributed import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        self._engine = self._core = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def _start(
        self,
        prompts: list[list[int]],
        salt: str,
        max_tokens: int,
        transfers: list[dict[str, Any]] | None = None,
        earlier: list[list[int]] | None = None,
        logprobs: int = 0,
    ) -> list[str]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        from headrace_decode.resume.output_replay import with_resume_tokens
        from headrace_decode.speculative.request_info import request_arguments
        from headrace_engine.kv_transfer.handoff import PARAMS_KEY, pull_params

        names = []
        for number, prompt in enumerate(prompts):
            extra = request_arguments(None, tenant=salt)
            if transfers is not None:
                extra[PARAMS_KEY] = pull_params(transfers[number])
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                logprobs=logprobs,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args=extra,
            )
            if earlier is not None and earlier[number]:
                params = with_resume_tokens(params, earlier[number])
            names.append(f"{salt}-{next(self._numbers)}")
            given = TokensPrompt(prompt_token_ids=prompt, cache_salt=salt)
            self._engine.add_request(names[-1], given, params)
        return names

    def _step(self, done: dict[str, _Output]) -> None:
        for output in self._engine.step():
            if output.request_id in done:
                done[output.request_id].add(output)

    def _until(self, condition: Any, why: str) -> None:
        """Run steps until it holds: an engine without requests takes none by itself."""
        deadline = time.monotonic() + IDLE_PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(why)
            self.ask([[FIRST_TOKEN]], "idle", 1)
            time.sleep(0.05)

    def _free_blocks(self) -> int:
        return int(self._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _counters(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for metric in self._engine.get_metrics():
            if metric.name in CHANNELS:
                found[metric.labels["event"]] += int(metric.value)
            elif metric.name == SOURCES:
                found[metric.labels["source"]] += int(metric.value)
            elif metric.name == ACCEPTED:
                found["accepted"] += int(metric.value)
        return found


class _Output:
    """What came of one request so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.leads: list[float] = []
        self.lines = ""
        self.finished = False
        self.transfer: Any = None

    def add(self, output: Any) -> None:
        """Add vLLM's next output."""
        from headrace_decode.resume.emitted import encode_line
        from headrace_decode.resume.output_replay import emitted_output

        [choice] = output.outputs
        self.tokens += choice.token_ids
        for token, ranked in zip(choice.token_ids, choice.logprobs or (), strict=False):
            best = sorted((each.logprob for each in ranked.values()), reverse=True)
            self.logprobs.append(ranked[token].logprob)
            if len(best) > 1:
                self.leads.append(best[0] - best[1])
        self.lines += encode_line(emitted_output(output)).decode()
        self.finished = output.finished
        self.transfer = output.kv_transfer_params or self.transfer

    @property
    def answer(self) -> list[Any]:
        """As `cases.Answer`."""
        return [self.tokens, self.logprobs, self.leads]


def main() -> None:
    argparse.ArgumentParser().parse_args()
    serve(Engines)


if __name__ == "__main__":
    main()
