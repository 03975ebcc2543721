"""State of a simulation's requests, engines and links, as arrays for compiled code.

A request goes through phases::

    QUEUED_P -> COMPUTING_P -> HANDOVER -> QUEUED_D -> MOVING -> DECODING -> DONE     on two engines
    QUEUED_D -> COMPUTING_D -> DECODING -> DONE                                       on one engine
    any -> LOST (its engine failed) -> placed again

An engine runs a *stretch*: `steps` steps of one batch. The first step takes `first_s`, and each
later one takes `more_s` longer than the step before it, so j steps take
``j first_s + j (j - 1) / 2 more_s``. A decode batch that no request joins or leaves is one event.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_lab.simulate.block_pool import Caches, new_caches
from headrace_lab.simulate.hardware import Hardware, StepCurve
from headrace_lab.simulate.trace import Workload

NEW, QUEUED_P, COMPUTING_P, HANDOVER, QUEUED_D, MOVING, COMPUTING_D, DECODING, DONE, LOST = range(
    10
)

ITL_BINS = 512
"""Number of bins of the histogram of step times that running requests saw: 1.02^bin x 0.1 ms."""
ITL_LEAST_S, ITL_GROWTH = 1e-4, 1.02
LOG_ROWS = 1 << 16
"""Maximum number of cache changes between two reads of the log."""
CHUNKS = 64
"""Maximum number of prompts computed in one step."""
FAR = np.inf


REQUEST = np.dtype(
    [
        ("arrival_s", "f8"),
        ("prompt", "i4"),
        ("output", "i4"),
        # Keys of its blocks: keys[chain + i] + offset for i below blocks.
        ("chain", "i8"),
        ("blocks", "i4"),
        ("offset", "i8"),
        ("phase", "i1"),
        # Engines that it is placed on; p is -1 if d computes its prompt.
        ("p", "i8"),
        ("d", "i8"),
        # Tokens whose KV it needs before the next token, and how many of them have KV.
        ("need", "i4"),
        ("ready", "i4"),
        ("emitted", "i4"),
        # Blocks of its chain that it references on each engine, and blocks without keys.
        ("held_p", "i4"),
        ("held_d", "i4"),
        ("plain_p", "i4"),
        ("plain_d", "i4"),
        # Tokens to compute, as reported by the engine and as assumed by the router.
        ("expected", "i4"),
        ("guess", "i4"),
        # Times of its first computation, its first token and its last token; inf before that.
        ("begun_s", "f8"),
        ("first_s", "f8"),
        ("end_s", "f8"),
        # Tokens of its prompt found in the computing engine's cache and in its node's store.
        ("cached", "i4"),
        ("loaded", "i4"),
        # Tokens computed for it, and moved to the decode engine, all tries together.
        ("computed", "i8"),
        ("moved", "i8"),
        ("tries", "i4"),
        ("preempted", "i4"),
        ("next", "i4"),
        # Priority in the queue of an engine with prefill admission: the lowest is next.
        ("due_s", "f8"),
    ],
    align=True,
)
ENGINE = np.dtype(
    [
        ("node", "i4"),
        ("alive", "i1"),
        # Whether new requests may be placed on it; a draining engine is alive and not open.
        ("open", "i1"),
        ("step_tokens", "i8"),
        ("max_requests", "i8"),
        # Prefill admission: whether it is on; prompt tokens that double the shortest step; tokens
        # of a step that are left beside a prompt which takes several steps.
        ("has_prefill_admission", "i1"),
        ("free_tokens", "f8"),
        ("spare_tokens", "i8"),
        # Waiting requests: a linked list and its length.
        ("head", "i4"),
        ("tail", "i4"),
        ("waiting", "i8"),
        # Admitted requests: they have KV blocks here.
        ("inside", "i8"),
        # The batch: requests that decode, their tokens, prompts, and requests that join next.
        ("running", "i8"),
        ("context", "i8"),
        ("chunks", "i8"),
        ("joins", "i8"),
        # The stretch, and when it ends (`wake_s`); inf when idle.
        ("begun_s", "f8"),
        ("first_s", "f8"),
        ("more_s", "f8"),
        ("steps", "i8"),
        ("wake_s", "f8"),
        # Seconds of the store loads of prompts that the next step computes.
        ("load_s", "f8"),
        # In the engine's reports: tokens and pairs that wait to be computed.
        ("queue_tokens", "i8"),
        ("queue_pairs", "f8"),
        # Known to the router: unfinished requests, prompt tokens and blocks that it sent.
        ("sent_requests", "i8"),
        ("sent_tokens", "i8"),
        ("sent_blocks", "i8"),
        # Totals of the run.
        ("busy_s", "f8"),
        ("prompt_tokens", "i8"),
        ("answer_tokens", "i8"),
        ("preemptions", "i8"),
    ],
    align=True,
)
EVENT = np.dtype(
    [("at_s", "f8"), ("order", "i8"), ("request", "i4"), ("tries", "i4")],
    align=True,
)
CHANGE = np.dtype(
    [("at_s", "f8"), ("holder", "i4"), ("key", "i8"), ("stored", "i1")],
    align=True,
)
NODE = np.dtype([("out_s", "f8"), ("in_s", "f8")])
"""Times at which a node's link is free again, outgoing and incoming."""


class Events(NamedTuple):
    """Events of a simulation.

    Attributes:
        heap: EVENT: timed events of requests, a heap.
        log: CHANGE: changes of caches, in order.
        lost: requests that lost their engine.
        count: heap size, next order, changes, lost requests, ended requests.
    """

    heap: NDArray[np.void]
    log: NDArray[np.void]
    lost: NDArray[np.int32]
    count: NDArray[np.int64]  # type: ignore[assignment]  # not the tuple's method


class Limits(NamedTuple):
    """Figures of the hardware (`Hardware`)."""

    prefills: int
    block_tokens: int
    block_bytes: float
    link_bytes_s: float
    inside_bytes_s: float
    transfer_fixed_s: float
    handoff_s: float
    store: int
    store_bytes_s: float
    store_fixed_s: float


class State(NamedTuple):
    """Arrays of a simulation: REQUEST [requests], ENGINE [engines], NODE [nodes].

    Prefill engines are first. `rows` and `joining` are [engines, maximum requests]: requests that
    decode, and requests that join. `chunk_of` and `chunk` are [engines, CHUNKS]: the prompts of a
    step, and the tokens of each. `itl`: number of tokens by the length of the step before them.
    """

    req: NDArray[np.void]
    eng: NDArray[np.void]
    rows: NDArray[np.int32]
    joining: NDArray[np.int32]
    chunk_of: NDArray[np.int32]
    chunk: NDArray[np.int32]
    links: NDArray[np.void]
    ev: Events
    kv: Caches
    keys: NDArray[np.int32]
    limits: Limits
    prefill_curve: StepCurve
    decode_curve: StepCurve
    itl: NDArray[np.int64]
    now_s: NDArray[np.float64]


def new_state(work: Workload, hardware: Hardware, prefills: int, decodes: int) -> State:
    """Return the state before the first request. Holders: the engines, then the nodes' stores."""
    sides = [hardware.prefill] * prefills + [hardware.decode] * decodes
    engines, per_node = len(sides), hardware.engines_per_node
    eng = np.zeros(engines, ENGINE)
    if hardware.mixed_nodes:
        nodes = -(-engines // per_node)
        eng["node"] = [e % nodes for side in (prefills, decodes) for e in range(side)]
    else:
        first = -(-prefills // per_node)
        nodes = first + -(-decodes // per_node)
        eng["node"][:prefills] = np.arange(prefills) // per_node
        eng["node"][prefills:] = first + np.arange(decodes) // per_node
    eng["alive"] = eng["open"] = 1
    eng["step_tokens"] = [side.step_tokens for side in sides]
    eng["max_requests"] = [side.max_requests for side in sides]
    eng["has_prefill_admission"] = [side.has_prefill_admission for side in sides]
    eng["free_tokens"] = [side.steps.free_tokens() for side in sides]
    eng["spare_tokens"] = [
        side.step_tokens // 15 if side.has_prefill_admission else 0 for side in sides
    ]
    eng["head"] = eng["tail"] = -1
    eng["wake_s"] = FAR
    rows = max(side.max_requests for side in sides)
    capacities = [side.kv_blocks for side in sides] + [hardware.store_blocks] * nodes
    limits = Limits(
        prefills=prefills,
        block_tokens=hardware.block_tokens,
        block_bytes=float(hardware.block_bytes),
        link_bytes_s=float(hardware.link_bytes_s),
        inside_bytes_s=float(hardware.inside_bytes_s),
        transfer_fixed_s=float(hardware.transfer_fixed_s),
        handoff_s=float(hardware.handoff_s),
        store=hardware.store_blocks,
        store_bytes_s=float(hardware.store_bytes_s),
        store_fixed_s=float(hardware.store_fixed_s),
    )
    return State(
        req=_requests(work),
        eng=eng,
        rows=np.zeros((engines, rows), np.int32),
        joining=np.zeros((engines, rows), np.int32),
        chunk_of=np.zeros((engines, CHUNKS), np.int32),
        chunk=np.zeros((engines, CHUNKS), np.int32),
        links=np.zeros(nodes, NODE),
        ev=Events(
            heap=np.zeros(2 * len(work) + 16, EVENT),
            log=np.zeros(LOG_ROWS, CHANGE),
            lost=np.zeros(len(work), np.int32),
            count=np.zeros(5, np.int64),
        ),
        kv=new_caches(capacities),
        keys=work.trace.keys,
        limits=limits,
        prefill_curve=hardware.prefill.curve,
        decode_curve=hardware.decode.curve,
        itl=np.zeros(ITL_BINS, np.int64),
        now_s=np.zeros(1),
    )


def _requests(work: Workload) -> NDArray[np.void]:
    trace, req = work.trace, np.zeros(len(work), REQUEST)
    req["arrival_s"] = work.arrival_s
    req["prompt"], req["output"] = trace.prompt[work.row], trace.output[work.row]
    req["chain"] = trace.starts[work.row]
    req["blocks"] = trace.starts[work.row + 1] - req["chain"]
    req["offset"] = work.offset
    req["p"] = req["d"] = req["next"] = -1
    for name in ("begun_s", "first_s", "end_s"):
        req[name] = FAR
    return req
