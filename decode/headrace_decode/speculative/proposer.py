"""The proposer class that vLLM loads: it connects a session to the engine and never raises.

    speculative_config={"method": "custom_class", "model": "<this module>.HeadraceProposer", ...}
    worker_cls="headrace_decode.speculative.drafting_worker.SpeculatingWorker"

vLLM passes rows without request ids to a proposer. Therefore, the worker class binds the proposer
to the model runner and announces each step; an unbound proposer drafts nothing. An exception from
`propose` would end the engine with all its requests. Here it costs one step's drafts, and after a
few in a row drafting stops until it is switched on again.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.draft import Source
from headrace_decode.speculative.held_blocks import HeldBlocks
from headrace_decode.speculative.order import FOR_MAX_S, Order, is_duration
from headrace_decode.speculative.planning.draft_planner import DraftPlanner, Mode
from headrace_decode.speculative.publish import figures, prices
from headrace_decode.speculative.request import Facts, facts_of
from headrace_decode.speculative.retrieval.corpus_loads import Corpora
from headrace_decode.speculative.retrieval.draft_memory import OWN_TEXT, Memory
from headrace_decode.speculative.retrieval.draft_memory import Settings as MemorySettings
from headrace_decode.speculative.session import Rows, Session, kv_room
from headrace_decode.speculative.settings import CONFIG_KEY, Settings
from headrace_decode.speculative.sharing.carrier import Carrier
from headrace_decode.speculative.sharing.exchange import Exchange

logger = logging.getLogger("headrace.speculation")

FAILURES_MAX = 8
"""Number of failures in a row after which drafting stops."""


class RunnerView:
    """The facts in vLLM's model runner that a proposer needs."""

    def __init__(self, runner: Any, draft_tokens: int) -> None:
        self._runner, self._draft_tokens = runner, draft_tokens
        self._held: HeldBlocks | None = None

    def rows(
        self,
        sampled: Sequence[Sequence[int]],
        num_tokens: NDArray[np.integer],
        token_ids: NDArray[np.integer],
        scheduled: Mapping[str, int],
    ) -> Rows:
        """Return the batch of the step that has just been sampled.

        Args:
            sampled, num_tokens, token_ids: the arguments that vLLM passes to `propose`.
            scheduled: number of tokens of each request in this step.
        """
        batch, count = self._runner.input_batch, len(sampled)
        request_ids = batch.req_ids[:count]
        lengths = num_tokens[:count]
        computed = batch.num_computed_tokens_cpu
        prefill = sum(
            max(int(lengths[row]) - int(computed[row]) - scheduled.get(request_ids[row], 0), 0)
            for row, tokens in enumerate(sampled)
            if not tokens
        )
        room = self._kv_tokens(request_ids, lengths)
        return Rows(request_ids, sampled, lengths, token_ids, room, prefill)

    def facts(self, request_id: str) -> Facts:
        """Return the facts about a request."""
        request = self._runner.requests[request_id]
        params = request.sampling_params
        return facts_of(
            request.num_prompt_tokens,
            None if params is None else params.max_tokens,
            None if params is None else params.extra_args,
            0.0 if params is None else params.temperature,
        )

    def _kv_tokens(
        self, names: Sequence[str], num_tokens: NDArray[np.integer]
    ) -> NDArray[np.integer] | None:
        """Return the room for drafts in the KV cache, by the blocks of the rows in the batch.

        Shared blocks count once, and blocks of requests outside the batch do not count.
        """
        table = self._runner.input_batch.block_table[0]
        blocks = table.num_blocks_per_row[: len(num_tokens)]
        # No request has block 0. Attention kernels may divide the scheduler's blocks.
        total = (self._runner.kv_cache_config.num_blocks - 1) * table.blocks_per_kv_block
        room = kv_room(
            num_tokens, blocks, table.block_size, total - int(blocks.sum()), self._draft_tokens
        )
        if room is None:
            return None
        if self._held is None:
            self._held = HeldBlocks(total + table.blocks_per_kv_block)
        free = total - self._held.update(names, table.block_table.np, blocks)
        return kv_room(num_tokens, blocks, table.block_size, free, self._draft_tokens)


class HeadraceProposer:
    """The proposer through which vLLM uses a `Session`."""

    def __init__(self, vllm_config: Any) -> None:
        """Create the session from vLLM's configuration.

        Raises:
            ValueError: a setting is invalid; vLLM aborts its start.
        """
        settings = Settings.read((vllm_config.additional_config or {}).get(CONFIG_KEY, {}))
        scheduler = vllm_config.scheduler_config
        self.planner = DraftPlanner(
            padded_sizes=vllm_config.compilation_config.cudagraph_capture_sizes or (),
            seed=settings.seed,
            controls=settings.controls,
        )
        self._mode = Order(Mode.parse(settings.mode))
        self._draft_cap: Order[int | None] = Order(None)
        self._rows_max = scheduler.max_num_seqs
        memory = load_memory(settings, vllm_config.model_config)
        self.session = Session(
            memory,
            self.planner,
            draft_tokens=vllm_config.speculative_config.num_speculative_tokens,
            model_tokens=vllm_config.model_config.max_model_len,
            step_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
            vocabulary=vllm_config.model_config.get_vocab_size(),
        )
        keeps = settings.drafter == "memory"
        self.corpora = Corpora(memory) if keeps else None
        self.carrier: Carrier | None = None
        if settings.exchange is not None and keeps:
            self.carrier = Carrier(Exchange(memory), settings.exchange)
        self._obey()
        self.failures = 0
        self._failures_in_a_row = 0
        self._engine: RunnerView | None = None
        self._scheduled: Mapping[str, int] = {}
        try:
            self.session.compile()
        except Exception:
            self._failed()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model, but vLLM calls this method."""

    def bind(self, engine: RunnerView) -> None:
        """Begin to draft with the worker's view of the model runner.

        The memory also begins to receive text from other replicas, if it is shared with them.
        """
        self._engine = engine
        if self.carrier is not None:
            self.carrier.start()

    def step_begins(
        self,
        scheduled: Mapping[str, int],
        drafts: Mapping[str, Sequence[int]],
        finished: Sequence[str] | set[str],
    ) -> None:
        """Record the begin of a step.

        Args:
            scheduled: number of tokens of each request in the step.
            drafts: draft tokens of each request in the step.
            finished: requests that have ended.
        """
        try:
            self._scheduled = scheduled
            drafted = sum(map(len, drafts.values()))
            self.session.begin(sum(scheduled.values()), drafted, scheduled, finished)
        except Exception:
            self._failed()

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.integer],
        token_ids_cpu: NDArray[np.integer],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the draft tokens of each row, at most `num_speculative_tokens` each."""
        try:
            if self._engine is None or self._failures_in_a_row >= FAILURES_MAX:
                return [[] for _ in sampled_token_ids]
            self._obey()
            rows = self._engine.rows(
                sampled_token_ids, num_tokens_no_spec, token_ids_cpu, self._scheduled
            )
            drafts = self.session.propose(rows, self._engine.facts)
            self._failures_in_a_row = 0
            return drafts
        except Exception:
            self._failed()
            return [[] for _ in sampled_token_ids]

    def command(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Change the settings that the command names, and return the state of drafting.

        Args:
            command: any of `mode` ("auto", "off", "static:K"), `draft_cap` (tokens a step, None for
                no cap) and `for_s` (seconds after which mode and cap of this command expire, and
                the standing values apply again).

        Raises:
            ValueError: a key or a value is not one of these; then nothing is changed.
        """
        unknown = sorted(set(command) - {"mode", "draft_cap", "for_s"})
        if unknown:
            raise ValueError(f"speculation: unknown {unknown}")
        mode = Mode.parse(command["mode"]) if "mode" in command else None
        cap, for_s = command.get("draft_cap"), command.get("for_s")
        if not (cap is None or (isinstance(cap, int) and cap >= 0)):
            raise ValueError(f"speculation: draft_cap {cap!r} is no count of tokens")
        if not (for_s is None or is_duration(for_s)):
            raise ValueError(
                f"speculation: for_s {for_s!r}: expected seconds above 0 and up to {FOR_MAX_S:g}"
            )
        now_s = time.monotonic()
        if mode is not None:
            self._mode.give(mode, now_s, for_s)
            self._failures_in_a_row = 0
        if "draft_cap" in command:
            self._draft_cap.give(cap, now_s, for_s)
        return self._report()

    def _report(self) -> dict[str, Any]:
        self._obey()
        now_s = time.monotonic()
        drafts = self._failures_in_a_row < FAILURES_MAX
        return {
            **self.planner.snapshot(),
            **figures(self.planner, self.session),
            "prices": prices(self.planner, self.session, self._rows_max, drafts),
            "failures": self.failures,
            "exchange": None if self.carrier is None else self.carrier.stats(),
            "draft_cap": self.session.draft_cap,
            "mode_left_s": self._mode.left_s(now_s),
            "draft_cap_left_s": self._draft_cap.left_s(now_s),
        }

    def memory_command(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Run `Corpora.command`; return an empty answer if another worker of this model drafts."""
        if self._engine is None:
            return {}
        if self.corpora is None:
            return {"error": "speculation.drafter keeps no memory: set it to memory"}
        return self.corpora.command(command)

    def _obey(self) -> None:
        """Apply the orders that are in force now."""
        now_s = time.monotonic()
        self.planner.mode = self._mode.at(now_s)
        self.session.draft_cap = self._draft_cap.at(now_s)

    def _failed(self) -> None:
        self.failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row <= FAILURES_MAX:
            logger.exception("drafting failed; the step goes on without drafts")
        if self._failures_in_a_row == FAILURES_MAX:
            logger.error("drafting failed %d times in a row and is off now", FAILURES_MAX)


def load_memory(settings: Settings, model_config: Any) -> Memory:
    """Create the memory according to the settings.

    Raises:
        ValueError: the options of the memory are invalid.
    """
    model, tokenizer = _digests(model_config)
    wanted = {Source.OPERATOR: settings.corpora, Source.RESPONSE: bool(settings.shared_k)}
    options = dict(settings.drafter_options or {})
    if settings.drafter == "ngram":
        options["sources"] = OWN_TEXT
    try:
        return Memory(
            MemorySettings(
                model=model,
                tokenizer=tokenizer,
                for_all=frozenset(source for source, on in wanted.items() if on),
                shared_k=settings.shared_k,
                **options,
            )
        )
    except TypeError as error:
        raise ValueError(f"{CONFIG_KEY}.drafter_options: {error}") from error


def _digests(config: Any) -> tuple[bytes, bytes]:
    """Return digests of the engine's model and tokenizer.

    Answers depend on the model, and the meaning of token ids on the tokenizer.
    """
    model = f"{config.model} {config.revision} {config.dtype} {config.quantization}"
    tokenizer = f"{config.tokenizer} {config.tokenizer_revision}"
    return _digest(model), _digest(tokenizer)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
