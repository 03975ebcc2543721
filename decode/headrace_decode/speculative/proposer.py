"""The proposer class that vLLM loads: it connects a session to the engine and never raises.

    speculative_config={"method": "custom_class", "model": "<this module>.HeadraceProposer", ...}
    worker_cls="headrace_engine.extensions.worker.ExtensibleWorker"

vLLM passes rows without request ids to a proposer. Therefore, `speculative_worker` binds the
proposer to the model runner and announces each step; an unbound proposer drafts nothing. An
exception from `propose` would end the engine with all its requests. Here it costs one step's
drafts, and after a few in a row speculative decoding stops until it is switched on again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.planning.draft_planner import DraftMode, DraftPlanner
from headrace_decode.speculative.replication.replication_log import ReplicationLog
from headrace_decode.speculative.replication.segment_replicator import SegmentReplicator
from headrace_decode.speculative.retrieval.corpus_manager import CorpusManager
from headrace_decode.speculative.retrieval.draft_memory import DraftMemory, MemorySettings
from headrace_decode.speculative.session import SpeculationSession
from headrace_decode.speculative.settings import CONFIG_KEY, SpeculationSettings
from headrace_decode.speculative.speculation_report import figures, step_seconds

if TYPE_CHECKING:
    from headrace_decode.speculative.runner_view import RunnerView

logger = logging.getLogger("headrace.speculation")

MAX_FAILURES = 8
"""Number of failures in a row after which speculative decoding stops."""


class HeadraceProposer:
    """The proposer through which vLLM uses a `SpeculationSession`."""

    def __init__(self, vllm_config: Any) -> None:
        """Create the session from vLLM's configuration.

        Raises:
            ValueError: a setting is invalid; vLLM aborts its start.
        """
        additional = vllm_config.additional_config or {}
        settings = SpeculationSettings.read(additional.get(CONFIG_KEY, {}))
        scheduler = vllm_config.scheduler_config
        self.planner = DraftPlanner(
            padded_sizes=vllm_config.compilation_config.cudagraph_capture_sizes or ()
        )
        self.planner.mode = DraftMode.parse(settings.mode)
        self._max_rows = scheduler.max_num_seqs
        memory = create_memory(settings, vllm_config.model_config)
        self.session = SpeculationSession(
            memory,
            self.planner,
            draft_tokens=vllm_config.speculative_config.num_speculative_tokens,
            model_tokens=vllm_config.model_config.max_model_len,
            step_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
            vocabulary=vllm_config.model_config.get_vocab_size(),
        )
        self.corpus_manager = CorpusManager(memory)
        self.replicator: SegmentReplicator | None = None
        if settings.replication is not None:
            self.replicator = SegmentReplicator(ReplicationLog(memory), settings.replication)
        self.failures = 0
        self._consecutive_failures = 0
        self._runner: RunnerView | None = None
        self._scheduled: Mapping[str, int] = {}
        try:
            self.session.compile()
        except Exception:
            self._on_failure()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model, but vLLM calls this method."""

    def bind(self, runner: RunnerView) -> None:
        """Begin to draft with the worker's view of the model runner.

        The memory also begins to receive text from other replicas, if it is shared with them.
        """
        self._runner = runner
        if self.replicator is not None:
            self.replicator.start()

    def begin_step(
        self,
        scheduled: Mapping[str, int],
        drafts: Mapping[str, Sequence[int]],
        finished: Sequence[str] | set[str],
    ) -> None:
        """Record the start of a step.

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
            self._on_failure()

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.integer],
        token_ids_cpu: NDArray[np.integer],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the draft tokens of each row, at most `num_speculative_tokens` each."""
        try:
            if self._runner is None or self._consecutive_failures >= MAX_FAILURES:
                return [[] for _ in sampled_token_ids]
            rows = self._runner.rows(
                sampled_token_ids, num_tokens_no_spec, token_ids_cpu, self._scheduled
            )
            drafts = self.session.propose(rows, self._runner.request_info)
            self._consecutive_failures = 0
            return drafts
        except Exception:
            self._on_failure()
            return [[] for _ in sampled_token_ids]

    def command(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Change the settings that the command names, and return the state of speculative decoding.

        Args:
            command: any of `mode` ("auto", "off", "static:K") and `draft_cap` (tokens a step, None
                for no cap).

        Raises:
            ValueError: a key or a value is not one of these; then nothing is changed.
        """
        unknown = sorted(set(command) - {"mode", "draft_cap"})
        if unknown:
            raise ValueError(f"speculation: unknown {unknown}")
        mode = DraftMode.parse(command["mode"]) if "mode" in command else None
        cap = command.get("draft_cap")
        if not (cap is None or (isinstance(cap, int) and cap >= 0)):
            raise ValueError(f"speculation: draft_cap {cap!r} is not a number of tokens")
        if mode is not None:
            self.planner.mode = mode
            self._consecutive_failures = 0
        if "draft_cap" in command:
            self.session.draft_cap = cap
        return self._report()

    def _report(self) -> dict[str, Any]:
        return {
            **self.planner.snapshot(),
            **figures(self.planner, self.session),
            "step_s": step_seconds(self.planner, self._max_rows),
            "failures": self.failures,
            "replication": None if self.replicator is None else self.replicator.stats(),
            "draft_cap": self.session.draft_cap,
        }

    def corpus_command(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Run `CorpusManager.command`; return {} if another worker of this model drafts."""
        return {} if self._runner is None else self.corpus_manager.command(command)

    def _on_failure(self) -> None:
        self.failures += 1
        self._consecutive_failures += 1
        if self._consecutive_failures <= MAX_FAILURES:
            logger.exception("making drafts failed; the step continues without drafts")
        if self._consecutive_failures == MAX_FAILURES:
            logger.error("speculative decoding is off: it failed %d times in a row", MAX_FAILURES)


def create_memory(settings: SpeculationSettings, model_config: Any) -> DraftMemory:
    """Create the memory according to the settings.

    Raises:
        ValueError: the options of the memory are invalid.
    """
    model, tokenizer = _digests(model_config)
    try:
        return DraftMemory(
            MemorySettings(
                model=model,
                tokenizer=tokenizer,
                public_corpora=settings.corpora,
                **(settings.drafter_options or {}),
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
