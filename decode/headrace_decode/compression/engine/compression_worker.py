"""Follows the compressed requests of an engine in its worker.

The scheduler says which requests read a context again, and when a request drops KV
(`CompressionMetadata`). The worker copies the retained KV at the beginning of that step, before
anything is overwritten.

The scheduler gives the context's other blocks to other requests in the same step. If the copy
fails, the request's KV is therefore lost. Only this request ends, with an error
(`lost_requests`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.attention.batch import BatchRow
from headrace_decode.compression.engine.compressed_attention import CompressedRow, RetainedPages
from headrace_decode.compression.engine.context_scorer import (
    ContextScorer,
    RereadRows,
    ScoringRow,
    scoring_row,
)
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.engine.incremental import (
    IncrementalCompression,
    IncrementalRow,
    RetainedContext,
)
from headrace_decode.compression.engine.metadata import CompressionMetadata, Retention
from headrace_decode.compression.engine.retained_format import decode_retained, encode_retained
from headrace_decode.compression.importance_predictor import ImportancePredictor
from headrace_engine.rope import Rope

logger = logging.getLogger("headrace.compression")


class CompressionWorker:
    """Compressed requests of an engine.

    Args:
        head_pages: head pages of the cache. scale: scale of the logits. rope: the model's rotary
            embedding.
        blocks: returns a request's blocks of the scheduler.
        predictor: as for `ContextScorer`. Requests can stream only with a predictor.

    Attributes:
        read: number of repeating rows that counted so far.
        dropped: number of contexts whose KV was dropped so far.
    """

    def __init__(
        self,
        head_pages: HeadPages,
        scale: float,
        rope: Rope,
        blocks: Callable[[str], Sequence[int]],
        predictor: ImportancePredictor | None = None,
    ) -> None:
        self.head_pages, self._scale, self._blocks = head_pages, scale, blocks
        self._rope = Rope(rope.speeds.to(head_pages.device))
        self._predictor = None if predictor is None else predictor.to(head_pages.device)
        self._rereads: dict[str, RereadRows] = {}
        self._seen: dict[str, int] = {}
        """By request that reads again: the first position that has not counted."""
        self.scorers: dict[str, ContextScorer] = {}
        self._incremental: dict[str, IncrementalCompression] = {}
        self._context_cache: dict[int, RetainedContext] = {}
        self._dropped: dict[str, RetainedPages] = {}
        self.read = self.dropped = 0

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request has dropped KV of its context."""
        return request_id in self._dropped

    def __bool__(self) -> bool:
        return bool(self._rereads or self._incremental or self._dropped)

    @torch.inference_mode()
    def begin_step(
        self, ended: Collection[str], preempted: Collection[str], metadata: CompressionMetadata
    ) -> set[str]:
        """Begin a step of the scheduler; return the requests whose KV is lost.

        Args:
            ended, preempted: requests whose blocks the step takes away.
        """
        lost: set[str] = set()
        for name in list(self.scorers):  # one, apart from those that are about to end
            with self._drop_on_error(name):
                self.scorers[name].score(metadata.layers)
        gone = {*ended, *preempted}
        for name in metadata.fits.keys() & self.scorers.keys() - gone:
            fit = metadata.fits[name]
            with self._drop_on_error(name):
                self.scorers[name].fit(fit.blocks * self.head_pages.in_block, fit.layers)
        for name in metadata.retentions.keys() - gone:
            with self._drop_on_error(name, lost):
                self._drop(name, metadata.retentions[name])
        for name in gone:
            self.scorers.pop(name, None)
            self._dropped.pop(name, None)
        for name in ended:
            self._rereads.pop(name, None)
            self._seen.pop(name, None)
            self._incremental.pop(name, None)
        for rereads in metadata.rereads.values():
            if rereads.begins:
                self.scorers.pop(rereads.request_id, None)
        self._rereads.update(metadata.rereads)
        begun = metadata.cached.keys() | metadata.loaded.keys()
        for name in (metadata.incremental | begun | (self._incremental.keys() & gone)) - {*ended}:
            with self._drop_on_error(name, lost):
                self._begin(name, metadata)
        for number in metadata.evicted:
            self._context_cache.pop(number, None)
        return lost

    @contextmanager
    def _drop_on_error(self, name: str, lost: set[str] | None = None) -> Iterator[None]:
        """Stop following a request if an error occurs. Its KV is lost then, if `lost` is given."""
        try:
            yield
        except Exception:
            logger.exception("%s: %s", name, "it keeps all KV" if lost is None else "KV is lost")
            for each in (self.scorers, self._incremental, self._dropped):
                each.pop(name, None)  # type: ignore[attr-defined]
            if lost is not None:
                lost.add(name)

    def _begin(self, name: str, metadata: CompressionMetadata) -> None:
        """Follow a request that streams."""
        if self._predictor is None:
            raise ValueError("there is no predictor")
        held = self._context_cache[metadata.cached[name]] if name in metadata.cached else None
        if name in metadata.loaded:
            held = self._opened(metadata.loaded[name])
        self._incremental[name] = IncrementalCompression(
            self.head_pages, self._scale, self._rope, self._predictor, held
        )
        if held is not None:
            self._dropped[name] = held.dropped

    def _opened(self, came: Retention) -> RetainedContext:
        description = self.head_pages.read_bytes(came.blocks[: came.description_blocks])
        return decode_retained(
            description, came.tokens, came.blocks[came.description_blocks :], self.head_pages
        )

    def _drop(self, name: str, drop: Retention) -> None:
        room = self.head_pages.of_blocks(drop.blocks[drop.description_blocks :])
        if (stream := self._incremental.get(name)) is not None:
            per = self.head_pages.page_tokens
            new = self.head_pages.pages(self._blocks(name))[
                stream.tokens // per : drop.tokens // per
            ]
            kept = stream.drop(drop.tokens, new, room)
            if drop.description_blocks:
                self.head_pages.write_bytes(
                    drop.blocks[: drop.description_blocks], encode_retained(kept)
                )
            if drop.cached_id is not None:
                self._context_cache[drop.cached_id] = kept
            held = kept.dropped
        else:
            stays, kept_of = self.scorers.pop(name).kept(len(room))
            held = RetainedPages.of(drop.tokens, stays, kept_of, room, self.head_pages)
        self.dropped += name not in self._dropped
        self._dropped[name] = held
        logger.info("%s: KV of %d tokens is kept in %d blocks", name, drop.tokens, len(drop.blocks))

    def select_rows(
        self,
        rows: Sequence[BatchRow],
        starts: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
    ) -> tuple[list[CompressedRow], list[ScoringRow | IncrementalRow]]:
        """Return a step's rows whose contexts have dropped KV, and the rows whose queries count.

        Args:
            rows: the batch.
            starts: int [rows + 1], first token of each row.
            kv_tokens: int [rows], tokens of each row's KV after the step.
        """
        dropped: list[CompressedRow] = []
        read: list[ScoringRow | IncrementalRow] = []
        for number, row in enumerate(rows):
            first, end, length = (int(x) for x in (*starts[number : number + 2], kv_tokens[number]))
            if (rereads := self._rereads.get(row.request_id)) is not None:
                scorer = self._scorer(rereads)
                seen = self._seen.get(row.request_id, 0)
                one = scoring_row(rereads, scorer, first, length - (end - first), end - first, seen)
                self._seen[row.request_id] = max(seen, length)
                if one is not None:
                    read.append(one)
                    self.read += one.repeating.stop - one.repeating.start
                continue
            if (stream := self._incremental.get(row.request_id)) is not None:
                at, ends = length - (end - first), row.prompt_tokens
                if ends - stream.tokens < self.head_pages.block_tokens:
                    stream.end()
                elif (mine := stream.rows(first, min(length, ends) - at)) is not None:
                    read.append(mine)
            if (held := self._dropped.get(row.request_id)) is not None:
                own = slice(
                    held.tokens // self.head_pages.page_tokens,
                    -(-length // self.head_pages.page_tokens),
                )
                dropped.append(CompressedRow(number, slice(first, end), length, held, own))
        return dropped, read

    def record_queries(
        self, read: Sequence[ScoringRow | IncrementalRow], layer: int, queries: Tensor
    ) -> None:
        """Count the queries of a step's rows in one layer; queries as for
        `ScoringRow.record_queries`."""
        for row in read:
            row.record_queries(layer, queries)

    def _scorer(self, rereads: RereadRows) -> ContextScorer:
        if rereads.request_id not in self.scorers:
            pages = self.head_pages.pages(self._blocks(rereads.request_id))
            pages = pages[: rereads.tokens // self.head_pages.page_tokens]
            made = ContextScorer(
                rereads, pages, self.head_pages, self._scale, self._rope, self._predictor
            )
            self.scorers[rereads.request_id] = made
        return self.scorers[rereads.request_id]
