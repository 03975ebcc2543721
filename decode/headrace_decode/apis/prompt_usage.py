"""The cost of one request's prompts, and whether the engine refused one.

For a request with several prompts, vLLM's completions report the cached tokens of only one prompt.
They also count the token that the engine draws for `echo` with `max_tokens: 0`. This module counts
all prompts of a request.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from typing import Any

_STREAMED = b"data: "


class PromptUsage:
    """The cost of one request's prompts.

    Attributes:
        prompts: number of prompts that reached the engine.
        refusal: why one of them was refused, with the field that is wrong; None if none was.
        samples: the engine's states (vLLM's `RequestState`) of the samples of a prompt that has
            several, by the name of its request.
    """

    def __init__(self) -> None:
        self.prompts = 0
        self.refusal: tuple[str, str | None] | None = None
        self.samples: dict[str, list[Any]] = {}
        self._cached: dict[int, int] = {}

    def begin(self) -> int:
        """Count a prompt that reaches the engine; return its number."""
        self.prompts += 1
        return self.prompts

    def record(self, prompt: int, cached_tokens: int) -> None:
        """Record the number of a prompt's tokens that were cached and not computed."""
        self._cached[prompt] = cached_tokens

    @property
    def cached_tokens(self) -> int:
        """Number of cached tokens of all prompts."""
        return sum(self._cached.values())


class CachedTokens:
    """The number of tokens of one prompt that no engine computed.

    The engine that answers counts tokens that it pulled from another engine as cached, although the
    other engine computed them.

    Args:
        usage: the usage of the client's request; None without such a request.
    """

    def __init__(self, usage: PromptUsage | None) -> None:
        self._usage = usage
        self._prompt = 0 if usage is None else usage.begin()
        self._limit: int | None = None

    def limit(self, tokens: int) -> None:
        """Record that the engines computed all but at most `tokens` tokens of the prompt."""
        self._limit = tokens if self._limit is None else min(self._limit, tokens)

    def correct(self, output: Any) -> None:
        """Set the right number of cached tokens in an output (vLLM's `RequestOutput`)."""
        tokens = output.num_cached_tokens or 0
        samples = [] if self._usage is None else self._usage.samples.get(output.request_id, [])
        for sample in samples:  # all but the first sample find the KV that the first one computed
            if not sample.is_prefilling:
                tokens = min(tokens, sample.num_cached_tokens)
        output.num_cached_tokens = tokens if self._limit is None else min(tokens, self._limit)
        if self._usage is not None:
            self._usage.record(self._prompt, output.num_cached_tokens)


USAGE: ContextVar[PromptUsage | None] = ContextVar("headrace_usage", default=None)
"""Usage of the client's request that this task answers; None without such a request."""


def completion(body: bytes, usage: PromptUsage, *, only_echo: bool) -> bytes:
    """Return a completion's document with the usage of all its prompts.

    Args:
        only_echo: whether the client wants only its prompts back, without an answer.
    """
    document = json.loads(body)
    usage_fields = document.get("usage")
    if not isinstance(usage_fields, dict):
        return body
    if only_echo:
        usage_fields["completion_tokens"] = 0
        usage_fields["total_tokens"] = usage_fields.get("prompt_tokens") or 0
        for choice in document.get("choices") or ():
            if choice.get("token_ids"):
                choice["token_ids"] = []
    if isinstance(details := usage_fields.get("prompt_tokens_details"), dict):
        details["cached_tokens"] = usage.cached_tokens
    return _encoded(document)


def completion_event(event: bytes, usage: PromptUsage, *, only_echo: bool) -> bytes:
    """Return one event of a completion's stream with the usage of all its prompts."""
    if b'"usage"' not in event or not event.startswith(_STREAMED + b"{"):
        return event
    data = event[len(_STREAMED) :].rstrip(b"\n")
    return _STREAMED + completion(data, usage, only_echo=only_echo) + b"\n\n"


def _encoded(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
