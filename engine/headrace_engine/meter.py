"""Measures the cost of computing and moving KV on one engine; all predictions of cost rest on it.

An engine reports, at each step, the tokens that it computed and the time that they took. When NIXL
moved KV or the store supplied some, it reports bytes and seconds. `EngineMeter` keeps the present
load, totals since the start, and the fit of the engine's step times. It also keeps a short backlog
of loads from the store, as samples for the models that are fitted to them. It imports neither Ray
nor vLLM; `headrace_engine.vllm.engine` feeds it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace_engine.kv_groups import BlockUse
from headrace_engine.step_time import StepTime
from headrace_engine.usage.usage_book import UsageBook

BACKLOG_SAMPLES = 256
"""Samples kept for a reader that comes later; older ones are dropped, since models forget them
anyway."""


class Step(NamedTuple):
    """One engine step. The fields are the arguments of `StepTime.observe`."""

    prompt: int
    rows: int
    draft: int
    context: float
    pairs: float
    seconds: float


class Transfer(NamedTuple):
    """One KV transfer over NIXL, seen from the side that pulled."""

    bytes: int
    seconds: float
    pieces: int = 1
    """Transfers into which the prompt's KV was cut, one for each pair of ranks, all at once."""


class StoreLoad(NamedTuple):
    """One step's load from the KV store."""

    medium: str
    """`dram` or `nvme`, as in KV events but in small letters."""
    bytes: int
    seconds: float


class Unproven(NamedTuple):
    """A pull whose KV was not used."""

    request_id: str
    """The request's id as it was given to the engine."""
    peer: str
    """The producing engine's id in NIXL."""
    kind: str
    """`pull_proof.identity.Unproved.kind`."""
    why: str


class Progress(NamedTuple):
    """The state of an engine that shows whether it hangs."""

    steps: int
    """Steps since the engine started."""
    running: int
    """Requests in its batch."""
    longest_step_s: float | None
    """Predicted seconds of the longest step that these requests allow; None if it is not known, or
    if it is not known whether the requests are in a step."""


@dataclass
class EngineMeter:
    """Load, totals and recent samples of one engine. Used from one event loop only."""

    step_time: StepTime = field(default_factory=StepTime)
    """Fit of the steps that are booked."""
    learns: bool = True
    """Whether `step_time` learns each step. False during the `rehearsal`, which chooses the steps
    to learn."""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV blocks in use, 0 to 1."""
    steps_total: int = 0
    prompt_tokens_total: int = 0
    transfers_total: int = 0
    transfer_bytes_total: int = 0
    transfer_seconds_total: float = 0.0
    transfer_failures_total: int = 0
    transfers_by_event: dict[str, int] = field(default_factory=dict)
    """Number of pulls by the result of their proof (`pull_events`)."""
    proof_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that the proofs took from the arrival of the bytes, by kind of proof."""
    store_totals: dict[str, float] = field(default_factory=dict)
    """Number of blocks by event (`connector.stats`); bytes and seconds of loads."""
    store_digest: bytes = b""
    """Namespace of this engine's blocks in the store; empty until the engine has reported it."""
    store_states: tuple[int, ...] = ()
    """Numbers of its cache groups of recurrent layers, which the engine reports with it."""
    usage: UsageBook = field(default_factory=UsageBook)
    """Sums of usage by tenant, and usage of the last requests."""
    block_use: BlockUse = field(default_factory=BlockUse)
    """Blocks that a request takes in the engine's KV cache."""
    kv_epoch: str = ""
    """Epoch since the last reset of the engine's caches, in hex; empty before any reset."""
    on_step: list[Callable[[Step], None]] = field(default_factory=list)
    """Called with each step. The next two are called with each finished transfer and load."""
    on_transfer: list[Callable[[Transfer], None]] = field(default_factory=list)
    on_load: list[Callable[[StoreLoad], None]] = field(default_factory=list)
    on_cache_groups: list[Callable[[BlockUse, bool], None]] = field(default_factory=list)
    """Called with the arguments of `set_cache_groups`, after the engine's start."""
    on_unproved: list[Callable[[Unproven], None]] = field(default_factory=list)
    """Called with each pull whose KV is not used, before the request's first token."""
    _loads: deque[StoreLoad] = field(default_factory=lambda: deque(maxlen=BACKLOG_SAMPLES))

    def load(self, running: int, waiting: int, kv_usage: float) -> None:
        """Set the scheduler's load: sequences running and waiting, share of KV blocks used."""
        self.running, self.waiting, self.kv_usage = running, waiting, kv_usage

    def set_cache_groups(self, use: BlockUse, has_states: bool) -> None:
        """Set what depends on the engine's KV cache groups.

        Args:
            use: blocks that a request takes.
            has_states: whether hits end only at blocks of which some layers have a state.
        """
        self.block_use = use
        for watcher in self.on_cache_groups:
            watcher(use, has_states)

    def progress(self, step_tokens: int, blocks: int, block_tokens: int) -> Progress:
        """Return how far the engine is.

        Args:
            step_tokens: maximum number of tokens that it computes in a step. blocks: number of
                blocks of its KV cache. block_tokens: tokens of a block.
        """
        longest_s = None
        if self.step_time.samples:
            held = self.held_tokens(blocks, block_tokens)
            longest_s = self.step_time.seconds(
                step_tokens, self.running, 0, held, step_tokens * (held + step_tokens)
            )
        return Progress(self.steps_total, self.running, longest_s)

    def held_tokens(self, blocks: int, block_tokens: int) -> float:
        """Return the tokens of KV that requests hold, in a cache of these blocks."""
        used = self.kv_usage * blocks
        return self.block_use.held_tokens(used, self.running, block_tokens)

    def step(self, step: Step, learns: bool = True) -> None:
        """Book one engine step.

        Args:
            learns: whether the step did nothing else, so that the model of step times learns from
                it.
        """
        self.steps_total += 1
        self.prompt_tokens_total += step.prompt
        if self.learns and learns:
            self.step_time.observe(*step)
        for watcher in self.on_step:
            watcher(step)

    def transfers(self, done: Iterable[Transfer], failed: int) -> None:
        """Book finished and failed KV transfers."""
        self.transfer_failures_total += failed
        for transfer in done:
            self.transfers_total += 1
            self.transfer_bytes_total += transfer.bytes
            self.transfer_seconds_total += transfer.seconds
            for watcher in self.on_transfer:
                watcher(transfer)

    def proofs(
        self,
        events: Mapping[str, int],
        seconds: Mapping[str, float],
        unproved: Iterable[Unproven],
    ) -> None:
        """Book the results of proofs."""
        for kind, took in seconds.items():
            self.proof_seconds[kind] = self.proof_seconds.get(kind, 0.0) + took
        for event, count in events.items():
            self.transfers_by_event[event] = self.transfers_by_event.get(event, 0) + count
        for pull in unproved:
            for watcher in self.on_unproved:
                watcher(pull)

    def renewed(self, epoch: str) -> None:
        """Book a reset of the engine's caches: its blocks in the store are no longer its own."""
        self.kv_epoch = epoch
        self.store_digest = b""

    def store(
        self,
        counts: Mapping[str, int],
        loads: Iterable[StoreLoad],
        digest: bytes = b"",
        states: Iterable[int] = (),
    ) -> None:
        """Book what the KV store did since the last call."""
        self.store_states = tuple(states) or self.store_states
        self.store_digest = digest or self.store_digest
        totals = self.store_totals
        for name, count in counts.items():
            totals[name] = totals.get(name, 0) + count
        for load in loads:
            self._loads.append(load)
            totals["load_bytes"] = totals.get("load_bytes", 0) + load.bytes
            totals["load_seconds"] = totals.get("load_seconds", 0.0) + load.seconds
            for watcher in self.on_load:
                watcher(load)

    def take_loads(self) -> list[StoreLoad]:
        """Return the loads since the last call (at most `BACKLOG_SAMPLES`) and forget them."""
        loads = list(self._loads)
        self._loads.clear()
        return loads

    def snapshot(self) -> dict[str, Any]:
        """Return a JSON-able view for status pages."""
        return {
            "running": self.running,
            "waiting": self.waiting,
            "kv_usage": round(self.kv_usage, 4),
            "steps": self.steps_total,
            "prompt_tokens_computed": self.prompt_tokens_total,
            "nixl": {
                "transfers": self.transfers_total,
                "bytes": self.transfer_bytes_total,
                "seconds": round(self.transfer_seconds_total, 6),
                "failures": self.transfer_failures_total,
                "proofs": dict(self.transfers_by_event),
                "proof_seconds": {k: round(s, 6) for k, s in self.proof_seconds.items()},
            },
            "store": dict(self.store_totals),
            "usage": self.usage.snapshot(),
        }


class ContextEstimate:
    """Estimate of the tokens that a step attends to, from statistics that do not contain it.

    The statistics give the number of computed prompt tokens, the prompts that got their first token
    with their lengths, and the tokens of KV that the running requests hold. The last tokens of a
    prompt are at its end. Earlier tokens are assumed to follow those that unfinished prompts have
    computed so far: the scheduler computes one long prompt at a time. The KV that is held beyond
    these prompts is the decoding rows' context; KV that requests share counts once.
    """

    def __init__(self) -> None:
        self._begun = 0
        """Tokens that unfinished prompts have computed."""

    def step(
        self, prompt: int, prompts: int, rows: int, held: float, finished: Finished
    ) -> tuple[float, float]:
        """Return `context` and `pairs` of a step, as in `StepTime.seconds`.

        Args:
            prompt: prompt tokens that it computed. prompts: number of requests that they are from.
            rows: requests that decoded. held: tokens of KV that requests hold after the step.
        """
        if finished.prompts and finished.prompts >= prompts:
            length = finished.tokens / finished.prompts
            pairs = prompt * length - prompt * prompt / (2 * finished.prompts)
        else:
            pairs = prompt * self._begun + prompt * prompt / 2
        self._begun = max(0, self._begun + prompt - finished.computed)
        context = held - self._begun - finished.tokens if rows else 0
        return max(float(rows), context), max(0.0, pairs)


class Finished(NamedTuple):
    """Prompts that got their first token in a step."""

    prompts: int = 0
    tokens: int = 0
    """Tokens of all these prompts together."""
    computed: int = 0
    """Tokens of them that the engine computed itself, in this step or before."""
