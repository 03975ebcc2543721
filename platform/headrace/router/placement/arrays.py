"""Layout of placement's arrays: engines, the request, nodes' stores, and each engine's costs."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_ROOM, SLOW_STEP, LATE = 1, 2, 4
"""Flags of the constraints that a choice breaks: KV headroom, ITL target, TTFT target."""

ENGINE = np.dtype(
    [
        ("key", "u8"),  # hash of its name
        ("prefill", "?"),  # may be asked to prefill for others
        ("decode", "?"),  # may answer
        ("cold", "?"),  # its first call includes handshakes
        ("node", "i8"),
        ("hbm", "i8"),  # holder; -1 if nothing is known of its cache
        ("step_tokens", "i8"),  # token budget of a step
        ("queued_tokens", "i8"),  # tokens of the prompts ahead, at `at_s`
        ("queued_pairs", "f8"),  # attention pairs of these tokens
        ("queue_s", "f8"),  # seconds to compute the prompts ahead
        ("at_s", "f8"),  # time of the queue's values, on the caller's clock
        ("reported_s", "f8"),  # time of the engine's last own report; -inf if it never reported
        ("measured_s", "f8"),  # when it last computed a prompt; inf: never measure it again
        ("drift", "f8"),  # growth of the variance of queue_s, s^2 a second
        ("prompts", "i8"),  # number of prompts ahead
        ("running", "i8"),  # requests that decode, or will before one more does
        ("context", "i8"),  # tokens of all these requests
        ("free_blocks", "i8"),  # KV headroom; -1 if unknown
        ("kept", "i8"),  # this and the next three: `BlockUse` of its cache
        ("windowed", "i8"),
        ("window_blocks", "i8"),
        ("prompt_blocks", "i8"),
        ("call_s", "f8"),
        ("call_error_s", "f8"),
        ("handoff_s", "f8"),
        ("handoff_error_s", "f8"),
        ("adapter_s", "f8"),  # seconds to load the request's LoRA adapter; 0 if it is loaded
        ("reload_s", "f8"),  # seconds to load again the adapter that this load evicts
        ("context_s", "f8"),  # this and the next two: `Prices` of its step times, beside the curve
        ("pair_s", "f8"),
        ("weight", "f8"),
        ("step_error", "f8"),  # relative
    ],
    align=True,
)
"""One engine."""

REQUEST = np.dtype(
    [
        ("prompt_tokens", "i8"),
        ("block_tokens", "i8"),
        ("token_bytes", "f8"),
        ("itl_s", "f8"),  # targets; inf for none
        ("ttft_s", "f8"),
        ("now_s", "f8"),
        ("affinity", "u8"),
    ],
    align=True,
)
"""One request, with the settings that hold for it."""

COST = np.dtype(
    [
        ("arrival_s", "f8"),  # A_p
        ("queue_s", "f8"),  # Q
        ("handoff_s", "f8"),
        ("last_s", "f8"),  # T_d(1, r_d)
        ("rest_s", "f8"),  # remote(p, d) without the maximum, T_d and behind_p
        ("behind_s", "f8"),  # behind_p(W_p)
        ("bytes", "f8"),  # KV bytes to move to d
        ("local_s", "f8"),
        ("local_ttft_s", "f8"),
        ("broken_local", "i8"),
        ("broken_remote", "i8"),
        ("node", "i8"),
        ("tie", "u8"),  # rank among engines that cost the same
    ],
    align=True,
)
"""One engine's part of every choice for one request."""


class NodeStores(NamedTuple):
    """The runs of a prompt that each node's store can supply, [nodes, runs], and load times."""

    lengths: NDArray[np.int64]
    """Tokens of each run; the runs follow each other from the prompt's beginning."""
    waits: NDArray[np.float64]
    """Predicted seconds until each run is in a medium from which it can be loaded."""
    media: NDArray[np.int64]
    """Indices in `headrace_kvstore.lookup.availability.MEDIA`."""
    loads: NDArray[np.float64]
    """(fixed_s, byte_s) of each node's media, [nodes, media, 2]."""
