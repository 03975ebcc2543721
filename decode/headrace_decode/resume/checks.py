"""Checks the earlier outputs from which a request resumes.

The lines (`said`) may come from a client that resumes its stream, so they prove nothing. The engine
must survive any content: each number that the engine or its frontend would use is checked here.
Outputs that are valid but invented harm no other client, since a client may append any tokens to
its own prompt anyway. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headrace_decode.resume.said import Output, Said


def check(
    outputs: Sequence[Output],
    *,
    choices: int,
    most_tokens: int,
    vocabulary: int,
    logprobs: int | None,
) -> None:
    """Check a resumed request's earlier outputs, in time linear in their size.

    Args:
        outputs: the earlier outputs.
        choices: number of choices that the request asks for.
        most_tokens: maximum number of tokens of a choice that has not ended.
        vocabulary: number of tokens in the model's vocabulary.
        logprobs: number of log-probabilities per token that the request asks for; None if it asks
            for none.

    Raises:
        ValueError: no engine can have given these outputs for such a request.
    """
    count: Counter[int] = Counter()
    ended = set()
    for output in outputs:
        for said in output:
            if said.index >= choices:
                raise ValueError(f"choice {said.index} of {choices}")
            if said.index in ended:
                raise ValueError(f"choice {said.index} goes on behind its end")
            if not said.tokens and said.finish is None:
                raise ValueError(f"choice {said.index} says nothing")
            _check_tokens(said, vocabulary, logprobs)
            count[said.index] += len(said.tokens)
            most = most_tokens + (said.finish is not None)
            if count[said.index] > most:
                raise ValueError(f"choice {said.index} has over {most} tokens")
            if said.finish is not None:
                ended.add(said.index)


def _check_tokens(said: Said, vocabulary: int, logprobs: int | None) -> None:
    if said.tokens and max(said.tokens) >= vocabulary:
        raise ValueError(f"token id {max(said.tokens)} is not in the vocabulary of {vocabulary}")
    if said.logprobs is None:
        if logprobs is not None and said.tokens:
            raise ValueError("tokens without their log-probabilities")
        return
    if logprobs is None:
        raise ValueError("log-probabilities that nobody asked for")
    if len(said.logprobs) != len(said.tokens):
        raise ValueError(f"{len(said.logprobs)} log-probabilities of {len(said.tokens)} tokens")
    most = 1 + (vocabulary if logprobs < 0 else logprobs)
    for token, ranked in zip(said.tokens, said.logprobs, strict=True):
        if not 1 <= len(ranked) <= most or ranked[0][0] != token:
            raise ValueError(f"log-probabilities of another token than {token}")
        if max(one[0] for one in ranked) >= vocabulary:
            raise ValueError("a log-probability of a token that is not in the vocabulary")
