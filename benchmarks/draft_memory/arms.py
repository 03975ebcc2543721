"""The drafters that are compared, behind one small interface. Each takes its own defaults.

``ours`` is the memory of this repository; ``arctic`` the suffix cache of Arctic Inference, called
as vLLM's proposer for it does; ``ngram`` vLLM's own prompt look-up.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.draft_memory.one_row import Draft, OneRowMemory
from headrace_decode.speculative.retrieval.draft_memory import MemorySettings

ARCTIC_DEPTH = 24
ARCTIC_FACTOR = 1.0
ARCTIC_LEAST = 0.1
"""vLLM's defaults: suffix_decoding_max_tree_depth, ..._max_spec_factor, ..._min_token_prob."""


class Arm(Protocol):
    """A drafter in a replay: one request at a time."""

    def open(self, prompt: NDArray[np.int32]) -> None: ...

    def extend(self, tokens: NDArray[np.int32]) -> None: ...

    def draft(self, context: NDArray[np.int32], most: int) -> NDArray[np.int32]: ...

    def verified(self, offered: int, accepted: int) -> None: ...

    def close(self) -> None: ...


STEP_S = 0.02
"""Seconds of a step on the memory's clock, so that statistics decay with time as in an engine."""


class Ours:
    """The memory; `floor` ends a draft where survival falls below it."""

    def __init__(self, floor: float, replica: int = 1, **parts: bool) -> None:
        self.now_s = 0.0
        settings = MemorySettings(floor=floor, replica=replica)
        self.memory = OneRowMemory(settings, lambda: self.now_s, **parts)
        self.predicted: list[tuple[float, bool]] = []
        self.firsts: list[tuple[int, bool]] = []
        """For each draft: tokens of its match, and whether its first token was accepted."""
        self._handle = 0
        self._draft: Draft | None = None

    def open(self, prompt: NDArray[np.int32]) -> None:
        self._handle = self.memory.open_request("", prompt)

    def extend(self, tokens: NDArray[np.int32]) -> None:
        self.memory.extend(self._handle, tokens)

    def draft(self, context: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        self.now_s += STEP_S
        self._draft = self.memory.draft(self._handle, most)
        return self._draft.tokens

    def verified(self, offered: int, accepted: int) -> None:
        if self._draft is not None:
            self.memory.feedback(self._draft, offered, accepted)
            if offered:
                self.firsts.append((self._draft.match_tokens, accepted > 0))
            for at, survival in enumerate(self._draft.survival.tolist()):
                self.predicted.append((survival, at < accepted))

    def close(self) -> None:
        self.memory.close_request(self._handle)


class Arctic:
    """The suffix cache with a tree over past answers and one over the request."""

    def __init__(self, factor: float = ARCTIC_FACTOR, least: float = ARCTIC_LEAST) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=ARCTIC_DEPTH)
        self.factor, self.least = factor, least
        self._request = 0

    def open(self, prompt: NDArray[np.int32]) -> None:
        self._request += 1
        self.cache.start_request(self._request, prompt)

    def extend(self, tokens: NDArray[np.int32]) -> None:
        self.cache.add_active_response(self._request, tokens)

    def draft(self, context: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        found = self.cache.speculate(
            self._request,
            context[-ARCTIC_DEPTH:],
            max_spec_tokens=most,
            max_spec_factor=self.factor,
            min_token_prob=self.least,
        )
        return np.array(found.token_ids, np.int32)

    def verified(self, offered: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        self.cache.stop_request(self._request)


class Ngram:
    """vLLM's prompt look-up for n-grams of 2 to 5 tokens."""

    def __init__(self, most: int, longest: int) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        config: Any = SimpleNamespace(
            speculative_config=SimpleNamespace(
                prompt_lookup_min=2, prompt_lookup_max=5, num_speculative_tokens=most
            ),
            model_config=SimpleNamespace(max_model_len=longest),
            scheduler_config=SimpleNamespace(max_num_seqs=1),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        self.proposer = NgramProposer(config)

    def open(self, prompt: NDArray[np.int32]) -> None:
        pass

    def extend(self, tokens: NDArray[np.int32]) -> None:
        pass

    def draft(self, context: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        lengths = np.array([len(context)], np.int32)
        (found,) = self.proposer.propose(self.proposer.k, [[0]], lengths, context[None, :])
        return np.array(found[:most], np.int32)

    def verified(self, offered: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        pass
