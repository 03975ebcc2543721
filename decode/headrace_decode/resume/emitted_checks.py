"""Checks the earlier outputs from which a request resumes.

The lines (`emitted`) may come from a client that resumes its stream, so they prove nothing. The
engine must survive any content: each number that the engine or its frontend would use is checked
here. Outputs that are valid but invented harm no other client, since a client may append any tokens
to its own prompt anyway. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headrace_decode.resume.emitted import EmittedChoice, EmittedOutput


def check_outputs(
    outputs: Sequence[EmittedOutput],
    *,
    choices: int,
    max_tokens: int,
    vocabulary: int,
    logprobs: int | None,
) -> None:
    """Check a resumed request's earlier outputs, in time linear in their size.

    Args:
        outputs: the earlier outputs.
        choices: number of choices that the request asks for.
        max_tokens: maximum number of tokens of a choice that has not ended.
        vocabulary: number of tokens in the model's vocabulary.
        logprobs: number of log-probabilities per token that the request asks for; None if it asks
            for none.

    Raises:
        ValueError: no engine can have given these outputs for such a request.
    """
    count: Counter[int] = Counter()
    ended = set()
    for output in outputs:
        for choice in output:
            if choice.index >= choices:
                raise ValueError(f"choice {choice.index} of {choices}")
            if choice.index in ended:
                raise ValueError(f"choice {choice.index} continues after its end")
            if not choice.tokens and choice.finish is None:
                raise ValueError(f"choice {choice.index} has neither tokens nor an end")
            _check_tokens(choice, vocabulary, logprobs)
            count[choice.index] += len(choice.tokens)
            limit = max_tokens + (choice.finish is not None)
            if count[choice.index] > limit:
                raise ValueError(f"choice {choice.index} has over {limit} tokens")
            if choice.finish is not None:
                ended.add(choice.index)


def _check_tokens(choice: EmittedChoice, vocabulary: int, logprobs: int | None) -> None:
    tokens = choice.tokens
    if tokens and max(tokens) >= vocabulary:
        raise ValueError(f"token id {max(tokens)} is not in the vocabulary of {vocabulary}")
    if choice.logprobs is None:
        if logprobs is not None and tokens:
            raise ValueError("tokens without their log-probabilities")
        return
    if logprobs is None:
        raise ValueError("log-probabilities that the request does not ask for")
    if len(choice.logprobs) != len(tokens):
        raise ValueError(f"{len(choice.logprobs)} log-probabilities of {len(tokens)} tokens")
    max_ranked = 1 + (vocabulary if logprobs < 0 else logprobs)
    for token, ranked in zip(tokens, choice.logprobs, strict=True):
        if not 1 <= len(ranked) <= max_ranked or ranked[0][0] != token:
            raise ValueError(f"log-probabilities of another token than {token}")
        if max(one[0] for one in ranked) >= vocabulary:
            raise ValueError("a log-probability of a token that is not in the vocabulary")
