"""The least of drafters: what followed the last tokens where they stood before in the same request.

Prompt look-up as in vLLM's `ngram`, with survivals that are counted: no memory beyond the request,
no tenants to keep apart. For engines without a memory, and for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculation.draft import EMPTY, Draft, DraftBatch, Source
from headrace_decode.speculation.jit import jit

MATCH_MAX = 16
_PRIOR_SUCCESS, _PRIOR_TRIALS = 2.0, 3.0


@dataclass
class _Text:
    tokens: NDArray[np.int32]
    length: int


class NgramDrafter:
    """Drafts from the request's own text. `draft.Drafter`, less what memory adds to it.

    Survival of ``i + 1`` tokens is ``q(match) ** (i + 1)``: ``q`` is the share of right tokens
    among those tried at this match length, halved every 350 trials.
    """

    def __init__(self, match_min: int = 2) -> None:
        self._match_min = match_min
        self._texts: dict[int, _Text] = {}
        self._next = 0
        self._right = np.full(MATCH_MAX + 1, _PRIOR_SUCCESS)
        self._tried = np.full(MATCH_MAX + 1, _PRIOR_TRIALS)

    def open_request(
        self,
        request_id: str,
        prompt_tokens: NDArray[np.int32],
        tenant: str = "",
        *,
        tag: str = "",
    ) -> int:
        room = np.empty(2 * len(prompt_tokens) + 256, np.int32)
        room[: len(prompt_tokens)] = prompt_tokens
        self._next += 1
        self._texts[self._next] = _Text(room, len(prompt_tokens))
        return self._next

    def extend(self, handle: int, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        text = self._texts.get(handle)
        if text is None:
            return
        end = text.length + len(tokens)
        if end > len(text.tokens):
            text.tokens = np.concatenate([text.tokens, np.empty(end, np.int32)])
        text.tokens[text.length : end] = tokens
        text.length = end

    def extend_many(
        self, handles: Sequence[int], tokens: NDArray[np.int32], counts: NDArray[np.int32]
    ) -> None:
        ends = np.cumsum(counts)
        for handle, end, count in zip(handles, ends, counts, strict=True):
            self.extend(handle, tokens[end - count : end])

    def draft(self, handle: int, max_tokens: int) -> Draft:
        text = self._texts.get(handle)
        if text is None or max_tokens <= 0:
            return EMPTY
        start, match = _longest_match(text.tokens[: text.length], self._match_min, MATCH_MAX)
        tokens = text.tokens[start : min(start + max_tokens, text.length)].copy()
        if match == 0 or not len(tokens):
            return EMPTY
        chance = self._right[match] / self._tried[match]
        survival = (chance ** np.arange(1, len(tokens) + 1)).astype(np.float32)
        return Draft(tokens, survival, Source.PROMPT, match, match)

    def draft_many(self, handles: Sequence[int], max_tokens: int | NDArray[np.int32]) -> DraftBatch:
        most = np.broadcast_to(np.asarray(max_tokens, np.int32), (len(handles),))
        drafts = [
            self.draft(handle, limit) for handle, limit in zip(handles, most.tolist(), strict=True)
        ]
        width = max(map(len, drafts), default=0)
        tokens = np.zeros((len(drafts), width), np.int32)
        survival = np.zeros((len(drafts), width), np.float32)
        for row, draft in enumerate(drafts):
            tokens[row, : len(draft)] = draft.tokens
            survival[row, : len(draft)] = draft.survival
        return DraftBatch(
            tokens,
            survival,
            np.array([len(draft) for draft in drafts], np.int32),
            np.array([draft.source for draft in drafts], np.int32),
            np.array([draft.match_tokens for draft in drafts], np.int32),
        )

    def feedback(self, handle: int, draft: Draft, offered_k: int, accepted_k: int) -> None:
        match = draft.match_tokens
        if offered_k > 0 and 0 < match <= MATCH_MAX:
            self._right[match] = 0.998 * self._right[match] + accepted_k
            self._tried[match] = 0.998 * self._tried[match] + offered_k

    def feedback_many(
        self, batch: DraftBatch, offered_k: NDArray[np.int32], accepted_k: NDArray[np.int32]
    ) -> None:
        for row in np.flatnonzero(offered_k).tolist():
            self.feedback(0, batch[row], int(offered_k[row]), int(accepted_k[row]))

    def close_request(self, handle: int, *, keep: bool = True) -> None:
        self._texts.pop(handle, None)


@jit
def _longest_match(text: NDArray[np.int32], match_min: int, match_max: int) -> tuple[int, int]:
    """Where the longest earlier occurrence of the text's end goes on, and its length; 0, 0 if there
    is none of `match_min` tokens. Of equals the latest."""
    best, at, end = match_min - 1, 0, len(text)
    for stop in range(end - 1, 0, -1):  # the occurrence is text[stop - length : stop]
        length = 0
        while (
            length < match_max
            and length < stop
            and text[stop - 1 - length] == text[end - 1 - length]
        ):
            length += 1
        if length > best:
            best, at = length, stop
            if length == match_max:
                break
    return (at, best) if at else (0, 0)
