"""The quantities by which a request is billed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from headrace_kvstore.identity.salts import split_salt, unmarked_salt

HEADER = b"x-headrace-usage"
"""Header of an answer that is no stream: the quantities that are not zero."""
MAX_VALUE = 2**60
"""Bound of a quantity that another process sends."""


@dataclass(slots=True)
class RequestUsage:
    """Work of engines for one request, or for several: quantities may be added up.

    A request that several engines worked on (a remote prefill, a stream that was resumed) has a
    part at each of them. Each part is counted by its own engine only.

    For a request that no engine preempted, whose answer began and whose KV arrived:

        prompt_tokens = computed + cached + dram + nvme + remote + pulled + blended

    of the engine that answers.

    Attributes:
        requests: answers that began, one for each choice of each prompt.
        prompt_tokens: tokens of their prompts.
        output_tokens: tokens of their answers, thrown away by the client or not.
        computed_tokens: tokens that an engine computed before the request's first output token.
            For a resumed stream also those of the earlier answer.
        decode_tokens: tokens that an engine computed after it: one for each step, its draft tokens,
            and everything that it computed again after a preemption.
        cached_tokens: tokens whose KV the engine's own cache held.
        dram_tokens, nvme_tokens: tokens whose KV was loaded from this tier of the node's store.
        remote_tokens: tokens whose KV the node had fetched for the request from another node or
            from an object store.
        pulled_tokens: tokens whose KV came from a prefill engine.
        blended_tokens: tokens whose KV was made from stored runs (KV blending).
        drafted_tokens, accepted_tokens: draft tokens that were verified, and those accepted.
        engine_s: seconds of the engine: of each step, the request's share by its scheduled tokens.
    """

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    dram_tokens: int = 0
    nvme_tokens: int = 0
    remote_tokens: int = 0
    pulled_tokens: int = 0
    blended_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    engine_s: float = 0.0

    def add(self, other: RequestUsage) -> None:
        """Add another usage to this one."""
        for name in NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def minus(self, other: RequestUsage) -> RequestUsage:
        """Return this usage less another one."""
        pairs = zip(self.values(), other.values(), strict=True)
        return usage_of_values([mine - its for mine, its in pairs])

    def copy(self) -> RequestUsage:
        """Return an equal usage."""
        return usage_of_values(self.values())

    def values(self) -> list[float]:
        """Return the quantities in the order of `NAMES`."""
        return [getattr(self, name) for name in NAMES]

    def to_dict(self) -> dict[str, float]:
        """Return the quantities that are not zero, by name."""
        return {name: value for name in NAMES if (value := getattr(self, name))}

    def header(self) -> bytes:
        """Return the value of `HEADER`, a dictionary of structured fields (RFC 9651)."""
        shown = {**self.to_dict(), "engine_s": round(self.engine_s, 6)}
        return ", ".join(f"{name}={value}" for name, value in shown.items()).encode()


NAMES: tuple[str, ...] = tuple(each.name for each in fields(RequestUsage))


def usage_of_values(values: Sequence[float]) -> RequestUsage:
    """Return the usage with these quantities, in the order of `NAMES`."""
    return RequestUsage(*values)  # type: ignore[arg-type]


def usage_of_dict(found: Mapping[str, Any]) -> RequestUsage:
    """Return the usage with these quantities; unknown names are ignored.

    Raises:
        ValueError: a quantity is no number from 0 to `MAX_VALUE`.
    """
    usage = RequestUsage()
    for name in NAMES:
        value = found.get(name, 0)
        number = float if name == "engine_s" else int
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= MAX_VALUE:
            raise ValueError(f"{name}: must be a number from 0 to {MAX_VALUE}, got {value!r}")
        setattr(usage, name, number(value))
    return usage


def tenant_of_salt(salt: str) -> str:
    """Return the tenant in a request's cache salt; empty if it names none."""
    return split_salt(unmarked_salt(salt))[0] or ""
