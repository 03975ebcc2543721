"""The batch of vLLM's model runner, as the proposer needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.block_counter import BlockCounter
from headrace_decode.speculative.request_info import RequestInfo, parse_request_info
from headrace_decode.speculative.session import BatchRows, kv_headroom
from headrace_engine.vllm.sampling import RunnerState


class RunnerView:
    """The rows and requests of a model runner whose requests draft at most `draft_tokens`."""

    def __init__(self, runner: Any, draft_tokens: int) -> None:
        self._state, self._draft_tokens = RunnerState(runner), draft_tokens
        self._block_counters: list[BlockCounter] = []

    def rows(
        self,
        sampled: Sequence[Sequence[int]],
        num_tokens: NDArray[np.integer],
        token_ids: NDArray[np.integer],
        scheduled: Mapping[str, int],
    ) -> BatchRows:
        """Return the batch of the step that has just been sampled.

        Args:
            sampled, num_tokens, token_ids: the arguments that vLLM passes to `propose`.
            scheduled: number of tokens of each request in this step.
        """
        request_ids = self._state.request_ids(len(sampled))
        lengths = num_tokens[: len(sampled)]
        computed = self._state.computed_tokens
        prefill = sum(
            max(int(lengths[row]) - int(computed[row]) - scheduled.get(request_ids[row], 0), 0)
            for row, tokens in enumerate(sampled)
            if not tokens
        )
        headroom = self._kv_headroom(request_ids, lengths)
        return BatchRows(request_ids, sampled, lengths, token_ids, headroom, prefill)

    def request_info(self, request_id: str) -> RequestInfo:
        """Return the facts about a request."""
        prompt_tokens, params = self._state.request(request_id)
        return parse_request_info(
            prompt_tokens,
            None if params is None else params.max_tokens,
            None if params is None else params.extra_args,
            0.0 if params is None else params.temperature,
        )

    def _kv_headroom(
        self, request_ids: Sequence[str], num_tokens: NDArray[np.integer]
    ) -> NDArray[np.integer] | None:
        """Return the room for drafts in the KV cache, by the blocks of the rows in the batch.

        Shared blocks count once, and blocks of requests outside the batch do not count.
        """
        tables = self._state.block_tables()
        counts = [table.counts[: len(num_tokens)] for table in tables]
        sizes = [table.block_tokens for table in tables]
        usable = tables[0].usable_blocks
        free = usable - sum(int(each.sum()) for each in counts)
        headroom = kv_headroom(num_tokens, counts, sizes, free, self._draft_tokens)
        if headroom is None:
            return None
        if not self._block_counters:
            self._block_counters = [BlockCounter(table.table_size) for table in tables]
        held = [
            counter.update(request_ids, table.blocks, each)
            for counter, table, each in zip(self._block_counters, tables, counts, strict=True)
        ]
        return kv_headroom(num_tokens, counts, sizes, usable - sum(held), self._draft_tokens)
