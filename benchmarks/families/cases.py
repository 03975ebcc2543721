"""The cases that each family goes through, and the judgement of their answers.

Pure: no engine, no clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

ANSWERS, ANSWER_TOKENS = 100, 32
SHORTEST, LONGEST = 36, 420
"""Tokens of a prompt; the windows and chunks of the models are 128 tokens."""
BOUNDARIES = (127, 128, 129, 159, 160, 161, 223, 255, 256, 257, 287, 383, 384, 385, 415)
"""Lengths of some prompts: around multiples of a block, of a window and of a chunk."""
FIRST_TOKEN, LAST_TOKEN = 5, 505
CLOSE = {"float32": 1e-3, "bfloat16": 0.25}
"""Nats by which two engines' log-probabilities of a token may differ: they sum in another order."""
TIE = {"float32": 1e-4, "bfloat16": 0.25}
"""Nats between a plain engine's two best tokens below which either is right."""


class Hit(NamedTuple):
    """Tokens of a prompt that no engine step computed, by source."""

    local: int = 0
    """From the engine's own prefix cache."""
    external: int = 0
    """From the store, a peer's store or another engine."""


@dataclass(frozen=True)
class Case:
    """One way to an answer.

    Attributes:
        name: as in the results.
        about: the way, for readers.
        hit: expected tokens by source, of the prompt's tokens and the cache's block size.
        events: prefixes of the counters that must rise, and of those that must not.
        needs_store: whether it needs the KV store.
        needs_prefix_cache: whether it needs the engine's prefix cache.
    """

    name: str
    about: str
    hit: Callable[[int, int], Hit]
    events: tuple[str, ...] = ()
    no_events: tuple[str, ...] = ()
    needs_store: bool = False
    needs_prefix_cache: bool = False

    @property
    def needs_hit(self) -> bool:
        """Whether the engine finds a part of the prompt."""
        return self.hit is not _computed


def full(tokens: int, block: int) -> int:
    """Return the tokens of a prompt that a cache can supply: one token is always computed."""
    return (tokens - 1) // block * block


def half(tokens: int, block: int) -> int:
    """Return the tokens of the first half of a prompt's full blocks."""
    return full(tokens, block) // block // 2 * block


def _computed(tokens: int, block: int) -> Hit:
    return Hit()


def _local(tokens: int, block: int) -> Hit:
    return Hit(local=full(tokens, block))


def _stored(tokens: int, block: int) -> Hit:
    return Hit(external=full(tokens, block))


def _both(tokens: int, block: int) -> Hit:
    first = half(tokens, block)
    return Hit(first, full(tokens, block) - first)


def _pulled(tokens: int, block: int) -> Hit:
    return Hit(external=tokens - 1)


CASES = (
    Case("cold", "the engine computes the prompt", _computed),
    Case(
        "local hit",
        "the prompt is in the engine's prefix cache",
        _local,
        needs_prefix_cache=True,
    ),
    Case(
        "store hit",
        "the prompt is in the store",
        _stored,
        events=("loaded_dram",),
        no_events=("lost_",),
        needs_store=True,
    ),
    Case(
        "local prefix, store tail",
        "the first half of the prompt is in the engine's prefix cache, the second in the store",
        _both,
        events=("loaded_dram",),
        no_events=("lost_",),
        needs_store=True,
        needs_prefix_cache=True,
    ),
    Case(
        "peer",
        "the prompt is in the store of another node",
        _stored,
        events=("pulled", "loaded_dram"),
        no_events=("lost_",),
        needs_store=True,
    ),
    Case(
        "remote prefill",
        "another engine computes the prompt, and its KV is pulled",
        _pulled,
        events=("proved",),
        no_events=("unproved_",),
    ),
    Case(
        "failed transfer",
        "the KV of another prompt is pulled, refused, and the prompt is computed",
        _computed,
        events=("unproved_",),
        no_events=("proved",),
    ),
    Case(
        "resume after kill",
        "the engine is killed during the answer, and another engine continues it",
        _computed,
        events=("resumed",),
    ),
    Case(
        "drafting",
        "the engine verifies draft tokens of earlier answers",
        _computed,
        events=("accepted",),
    ),
)
BY_NAME = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Lengths:
    """The lengths of a family's prompts.

    Attributes:
        shortest, longest: tokens.
        multiple: each length is one more than a multiple of this; 1 for any length.
    """

    shortest: int = SHORTEST
    longest: int = LONGEST
    multiple: int = 1


def prompts(lengths: Lengths, count: int = ANSWERS, seed: int = 0) -> list[list[int]]:
    """Return prompts of random tokens; hardly any two have a prefix in common."""
    draw = random.Random(seed)
    found = []
    known = [n for n in BOUNDARIES if lengths.shortest <= n <= lengths.longest]
    for number in range(count):
        tokens = draw.randint(lengths.shortest, lengths.longest)
        tokens = known[number] if number < len(known) else tokens
        tokens = tokens // lengths.multiple * lengths.multiple + (lengths.multiple > 1)
        found.append([draw.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)])
    return found


class Answer(NamedTuple):
    """An engine's answer.

    Attributes:
        tokens: greedy token ids.
        logprobs: of each token, nats.
        leads: nats between each token and the next best one; empty if not asked for.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    leads: Sequence[float] = ()


class Comparison(NamedTuple):
    """An answer beside a plain engine's.

    Attributes:
        differs: whether it is another answer.
        is_tie: whether it differs from a place on where a plain engine's two best tokens tie.
        error_nats: largest difference of log-probabilities before the answers part.
    """

    differs: bool
    is_tie: bool
    error_nats: float


def compare(answer: Answer, truth: Answer, dtype: str) -> Comparison:
    """Compare an answer with a plain engine's answer, whose `leads` are given.

    Log-probabilities count from the end: those of earlier tokens of a resumed answer are missing.
    """
    same = next(
        (n for n, (a, b) in enumerate(zip(answer.tokens, truth.tokens)) if a != b),  # noqa: B905
        min(len(answer.tokens), len(truth.tokens)),
    )
    missing = len(answer.tokens) - len(answer.logprobs)
    errors = [abs(answer.logprobs[n - missing] - truth.logprobs[n]) for n in range(missing, same)]
    is_close = all(error <= CLOSE[dtype] for error in errors)  # no number is not close
    whole = same == len(answer.tokens) == len(truth.tokens)
    tie = not whole and same < len(truth.leads) and truth.leads[same] < TIE[dtype]
    wrong = (not whole and not tie) or not is_close
    return Comparison(wrong, tie and not wrong, max(errors, default=0.0))


def why_another_way(
    case: Case, lengths: Sequence[int], block: int, hit: Hit, events: Mapping[str, float]
) -> str | None:
    """Return how the answers of a case came in another way than it says; None if they did not.

    Args:
        lengths: tokens of the prompts. hit: of all prompts. events: by how much counters rose.
    """
    expected = [case.hit(tokens, block) for tokens in lengths]
    local, external = (sum(part) for part in zip(*expected, strict=True))
    if case.needs_hit and not local + external:
        return f"no prompt has a block of {block} tokens"
    if hit.local != local:
        return f"{hit.local} tokens came from the engine's prefix cache, not {local}"
    # A pull brings the prompt's last token or leaves it, as vLLM likes.
    room = len(lengths) if case.hit is _pulled else 0
    if not external <= hit.external <= external + room:
        return f"{hit.external} tokens came from elsewhere, not {external}"
    for prefix in case.events:
        if not any(name.startswith(prefix) and n > 0 for name, n in events.items()):
            return f"nothing was counted as {prefix}"
    for prefix in case.no_events:
        if bad := {name: n for name, n in events.items() if name.startswith(prefix) and n > 0}:
            return f"counted: {bad}"
    return None


def verdict(answers: Sequence[Answer], truths: Sequence[Answer], dtype: str) -> dict[str, Any]:
    """Return the numbers of a case's answers, for the results."""
    found = [compare(a, b, dtype) for a, b in zip(answers, truths, strict=True)]
    return {
        "answers": len(found),
        "differing": sum(each.differs for each in found),
        "ties": sum(each.is_tie for each in found),
        "error_nats": float(f"{max((each.error_nats for each in found), default=0.0):.2g}"),
    }


def tolerated(found: Mapping[str, Any]) -> int:
    """Return how many answers of a case may differ: in bfloat16 as many as a plain engine's own if
    it computes their first tokens as a part of the prompt; none in float32.

    Args:
        found: a family's results.
    """
    return int(found.get("plain", {}).get("continued", {}).get("differing", 0))
