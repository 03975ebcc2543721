"""A report: how one replica stands, as every gateway sees it. Encoding and decoding, nothing else.

A report is a msgpack map. Fields that a reader does not know are ignored, and those that a writer
leaves out have the values given here, so replicas and gateways of neighbouring versions understand
each other. A gateway trusts no number: each has bounds, and a report that breaks one is refused
whole. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
from msgspec import Meta

MOST_BYTES = 256 * 1024
"""Of a report's bytes."""
MOST_HEARD = 256
"""Plans that one report names."""
HEARD_S = 2.0
"""How long a report names a plan that was taken up."""

Name = Annotated[str, Meta(max_length=128)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Amount = Annotated[float, Meta(ge=0.0, le=1e18)]
Medium = Annotated[str, Meta(pattern="^(dram|nvme|remote|object)$")]
Logarithm = Annotated[float, Meta(ge=-40.0, le=40.0)]


class Steps(TypedDict):
    """`StepTime.to_dict()`; `StepTime.from_dict` reads it."""

    state: Annotated[list[Logarithm], Meta(max_length=256)]
    square: Annotated[float, Meta(ge=0.0, le=1e6)]
    samples: Count
    padded_sizes: Annotated[list[Annotated[int, Meta(ge=1, le=2**24)]], Meta(max_length=4096)]


class Mean(NamedTuple):
    """A measured overhead, and how far one measurement is off (root mean square)."""

    seconds: Seconds
    error_s: Seconds


class Transfer(NamedTuple):
    """Moving KV takes `fixed_s + byte_s * bytes`. `error`: relative, root mean square."""

    fixed_s: Seconds
    byte_s: Seconds
    error: Seconds


class Load(NamedTuple):
    """Loading from a medium of the node's store takes `fixed_s + byte_s * bytes`."""

    fixed_s: Seconds
    byte_s: Seconds


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica at one moment.

    Attributes:
        seq: number of the report. Its sender counts from 0; there may be gaps.
        kv: what decides with whom it can exchange KV, a `headrace_engine.exchange.KvKind` as text.
            Empty: with all others.
        replica: the replica's id. machine: Ray's id of its node.
        block_tokens: tokens of a KV block. token_bytes: KV bytes of a token.
        step_tokens: most tokens of one prompt that the engine computes in a step.
        running: requests that decode. context: tokens of KV that they attend to together.
        coming, coming_context: of a decode replica: requests that will decode here and do not yet,
            and tokens of their prompts.
        prompts: that an engine computes, or will, before that of a new request.
        queued_tokens: prompt tokens ahead of a new request. queued_pairs: what these attend to
            (`headrace_engine.steptime.pairs_of`).
        free_blocks: KV blocks that no request uses; -1 if that is not known.
        steps: the engine's step times; None before they are known.
        draining: the replica takes no new requests.
        heard: ids of the plans that were taken up in the last `HEARD_S` seconds.
        call, handoff: of a decode replica: overhead of a prefill call; from its return to the
            first token, beside transfer and step.
        share: of a decode replica: part of its speed that it loses beside a prefill on its node.
        transfer: of a decode replica: pulling KV.
        loads: by medium of the node's store.
        draft_tokens: most that one request may draft in a step at the present load.
        tested_tokens, right_tokens: of late, drafted tokens that were put to the test, and those
            that were right.
        policy: of a decode replica: `cost`, or the kind of plan that is forced.
        computed_s: seconds since the engine last computed a prompt; None if it has not.
    """

    replica: Annotated[str, Meta(min_length=1, max_length=128)]
    role: Literal["prefill", "decode"]
    machine: Name
    block_tokens: Annotated[int, Meta(ge=1, le=2**20)]
    token_bytes: Annotated[float, Meta(gt=0.0, le=1e9)]
    step_tokens: Annotated[int, Meta(ge=1, le=2**24)]
    seq: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    kv: Name = ""
    running: Count = 0
    context: Count = 0
    coming: Count = 0
    coming_context: Count = 0
    prompts: Count = 0
    queued_tokens: Count = 0
    queued_pairs: Amount = 0.0
    free_blocks: Annotated[int, Meta(ge=-1, le=2**40)] = -1
    steps: Steps | None = None
    draining: bool = False
    heard: Annotated[tuple[Name, ...], Meta(max_length=MOST_HEARD)] = ()
    call: Mean | None = None
    handoff: Mean | None = None
    share: Share = 0.0
    transfer: Transfer | None = None
    loads: Annotated[dict[Medium, Load], Meta(max_length=4)] = {}
    draft_tokens: Count = 0
    tested_tokens: Amount = 0.0
    right_tokens: Amount = 0.0
    policy: Literal["cost", "local", "remote"] = "cost"
    computed_s: Seconds | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Report)


def encode(report: Report) -> bytes:
    """The bytes of a report.

    Raises:
        ValueError: it has more than `MOST_BYTES`.
    """
    data = _encoder.encode(report)
    if len(data) > MOST_BYTES:
        raise ValueError(f"a report has at most {MOST_BYTES} bytes, not {len(data)}")
    return data


def decode(data: bytes) -> Report:
    """The report in these bytes, all of its numbers within their bounds.

    Raises:
        ValueError: this is no report; the text names the field that cannot be.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"a report has at most {MOST_BYTES} bytes, not {len(data)}")
    try:
        report = _decoder.decode(data)
    except RecursionError as error:
        raise ValueError("a report is not nested so deeply") from error
    for field, numbers in _fractions(report):  # no bound of msgspec's refuses a nan
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"Expected a finite number - at `$.{field}`")
    return report


def _fractions(report: Report) -> Iterable[tuple[str, Iterable[float]]]:
    numbers: dict[str, Any] = {
        name: [getattr(report, name)]
        for name in ("token_bytes", "queued_pairs", "share", "tested_tokens", "right_tokens")
    }
    for name in ("call", "handoff", "transfer"):
        numbers[name] = getattr(report, name) or ()
    if report.computed_s is not None:
        numbers["computed_s"] = [report.computed_s]
    if report.steps is not None:
        numbers["steps.state"] = report.steps["state"]
        numbers["steps.square"] = [report.steps["square"]]
    numbers |= {f"loads.{medium}": load for medium, load in report.loads.items()}
    return numbers.items()
