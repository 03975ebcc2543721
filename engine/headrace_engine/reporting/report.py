"""Encodes and decodes a report: the state of one replica, as every gateway sees it.

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

from headrace_engine.kv_groups import BlockUse

MAX_BYTES = 256 * 1024
"""Maximum size of a report."""
MAX_ADAPTERS = 256
"""Maximum number of adapters that one report names."""
MAX_HEARD = 256
"""Maximum number of plans that one report names."""
HEARD_S = 2.0
"""Time for which reports name a plan after it arrived."""

Name = Annotated[str, Meta(max_length=128)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
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
        kv: a `headrace_engine.kv_transfer.compatibility.KvKind` as text, which decides with which
            replicas it can exchange KV. Empty: with all others.
        replica: the replica's id. machine: Ray's id of its node.
        block_tokens: tokens of a KV block. token_bytes: KV bytes of a token.
        step_tokens: maximum number of tokens of one prompt that the engine computes in a step.
        running: requests that decode. context: tokens of KV that they attend to together.
        coming, coming_context: requests that will decode on this decode replica and do not yet, and
            the tokens of their prompts.
        prompts: prompts that the engine computes before that of a new request.
        queued_tokens: prompt tokens ahead of a new request. queued_pairs: pairs of these and the
            tokens that they attend to (`headrace_engine.step_time.pairs_of`).
        free_blocks: KV blocks that no request uses; -1 if that is not known.
        block_use: blocks that a request takes in the KV cache.
        steps: the engine's step times; None before they are known.
        draining: the replica takes no new requests.
        heard: ids of the plans that arrived in the last `HEARD_S` seconds.
        call: overhead of a decode replica's prefill call. handoff: overhead from the return of the
            call to the first token, without transfer and step.
        transfer: cost of pulling KV to a decode replica.
        loads: cost of loading from the node's store, by medium.
        policy: a decode replica's policy: `cost`, or the kind of plan that is forced.
        computed_s: seconds since the engine last computed a prompt; None if it has not.
        adapters: digests of the LoRA adapters that the engine has loaded.
        adapter_slots: number of adapters that it can have.
        adapter_load_s: predicted seconds of loading another one.
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
    block_use: BlockUse = BlockUse()
    steps: Steps | None = None
    draining: bool = False
    heard: Annotated[tuple[Name, ...], Meta(max_length=MAX_HEARD)] = ()
    call: Mean | None = None
    handoff: Mean | None = None
    transfer: Transfer | None = None
    loads: Annotated[dict[Medium, Load], Meta(max_length=4)] = {}
    policy: Literal["cost", "local", "remote"] = "cost"
    computed_s: Seconds | None = None
    adapters: Annotated[tuple[Name, ...], Meta(max_length=MAX_ADAPTERS)] = ()
    adapter_slots: Count = 0
    adapter_load_s: Seconds = 0.0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Report)


def encode(report: Report) -> bytes:
    """Return the bytes of a report.

    Raises:
        ValueError: it has more than `MAX_BYTES`.
    """
    data = _encoder.encode(report)
    if len(data) > MAX_BYTES:
        raise ValueError(f"a report has at most {MAX_BYTES} bytes, not {len(data)}")
    return data


def decode(data: bytes) -> Report:
    """Return the report in these bytes, with all of its numbers within their bounds.

    Raises:
        ValueError: this is no report; the text names the field that is wrong.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"a report has at most {MAX_BYTES} bytes, not {len(data)}")
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
        name: [getattr(report, name)] for name in ("token_bytes", "queued_pairs", "adapter_load_s")
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
