"""Performance of the simulated machines: engines, links between them, and each node's KV store.

The default engine is an H100 SXM GPU (80 GB) that serves an 8B model of the Llama 3 shape (32
layers, 8 KV heads, head dimension 128, hidden size 4,096, 8.03e9 weights) in bfloat16. Its numbers
are computed from the data sheet (989 TFLOP/s dense bfloat16, 3.35 TB/s), at shares of the peak that
public measurements of vLLM come close to:

- A step reads the weights: 16.06 GB at 80 % of the bandwidth, 6.0 ms. Scheduling, sampling and
  launches take 2 ms more. Total: 8 ms.
- A token computes 2 x 7.5e9 FLOP (the table of the input's embeddings is not multiplied) at 50 % of
  the peak: 30 us, so 33,000 tokens/s. Up to about 200 tokens are hidden by reading the weights.
- A pair (a token and one that it attends to) computes 4 x 32 layers x 4,096 FLOP at 45 %: 1.2 ns.
- A running request reads 131,072 bytes of KV for each token of its context, at 80 %: 49 ns.
- KV cache: 90 % of 80 GB, less the weights and 2 GB of workspace: 54 GB, 412,000 tokens.
- Links: 200 GB/s for a node of 8 engines (eight 400 Gb/s ports, half used). Engines of one node are
  linked at 300 GB/s (NVLink, one way, two thirds). A transfer takes a fixed 5 ms for the handshake.
- Node store: 2 TB of DRAM and eight NVMe drives hold 8 TB of KV; each engine reads it at 25 GB/s (a
  drive's 7 GB/s and PCIe's 50 GB/s, mixed), after 5 ms.

A calibrated step model (`headrace_engine.step_time.StepTime`) replaces the first four.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_engine.step_time import KNOTS, StepTime
from headrace_kvstore.numba_jit import jit
from headrace_lab.simulate.trace import BLOCK_TOKENS

_WEIGHTS_S, _OVERHEAD_S, _TOKEN_S = 0.0060, 0.0020, 30e-6
_CONTEXT_S, _PAIR_S = 49e-9, 1.2e-9


class StepCurve(NamedTuple):
    """Step-time model as numbers for compiled code; `step_s` shows their meaning."""

    knots: NDArray[np.float64]
    plain: NDArray[np.float64]
    sizes: NDArray[np.float64]
    weight: float
    context_s: float
    pair_s: float


def default_steps() -> StepTime:
    """Return the step times of this module's default GPU, as a fitted model."""
    plain = _OVERHEAD_S + np.maximum(_WEIGHTS_S, _TOKEN_S * np.asarray(KNOTS))
    level, weight = 1.0, 1.0
    rates = np.log([level, weight, _CONTEXT_S, _PAIR_S])
    state = np.concatenate([np.log(plain), np.log(plain), rates])
    return StepTime.from_dict(
        {
            "state": state.tolist(),
            "square": 0.0025,
            "samples": 1000,
            "padded_sizes": [],
        }
    )


def curve_of(fit: StepTime) -> StepCurve:
    """Return a model's curve without drafts."""
    prices = fit.prices()
    return StepCurve(
        knots=np.asarray(KNOTS),
        plain=np.asarray(prices.plain),
        sizes=np.asarray(fit.padded_sizes, np.float64),
        weight=float(prices.weight),
        context_s=float(prices.context_s),
        pair_s=float(prices.pair_s),
    )


@jit()
def step_s(c: StepCurve, prompt: float, rows: float, context: float, pairs: float) -> float:
    """Return the seconds of a step, as `StepTime.seconds` does without drafts."""
    size = c.weight * prompt + rows
    if len(c.sizes) > 0:
        at = np.searchsorted(c.sizes, size)
        if at < len(c.sizes):
            size = c.sizes[at]
    last = len(c.knots) - 1
    if size <= 1.0:
        seconds = c.plain[0]
    elif size >= c.knots[last]:
        seconds = c.plain[last] * size / c.knots[last]
    else:
        at = np.searchsorted(c.knots, size)
        low, high = c.knots[at - 1], c.knots[at]
        share = (size - low) / (high - low)
        seconds = c.plain[at - 1] + (c.plain[at] - c.plain[at - 1]) * share
    return seconds + c.context_s * context + c.pair_s * pairs


@jit()
def prefill_s(c: StepCurve, tokens: int, end: int, step_tokens: int) -> float:
    """Return the seconds to compute a prompt's last `tokens` tokens, up to token `end`, alone."""
    total, first = 0.0, end - tokens
    while first < end:
        last = min(end, first + step_tokens)
        pairs = 0.5 * (float(last) * (last + 1) - float(first) * (first + 1))
        total += step_s(c, last - first, 0, 0, pairs)
        first = last
    return total


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: its steps, its KV cache, its scheduler's limits."""

    steps: StepTime = field(default_factory=default_steps)
    kv_blocks: int = 805
    #: Maximum tokens and requests of a step: vLLM's max_num_batched_tokens and max_num_seqs.
    step_tokens: int = 8192
    max_requests: int = 256
    #: Whether `headrace_engine.prefill_admission` admits the prompts to the scheduler, and not all
    #: at once. `step_tokens` is then a prompt's share of a step, 15/16 of it.
    has_prefill_admission: bool = False

    def __post_init__(self) -> None:
        for name in ("kv_blocks", "step_tokens", "max_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_requests >= self.step_tokens:
            raise ValueError("step_tokens must be more than max_requests")

    @property
    def curve(self) -> StepCurve:
        return curve_of(self.steps)


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machines.

    Decode engines have a smaller step, since each step with a prompt delays the running requests.
    """

    prefill: Engine = field(default_factory=Engine)
    decode: Engine = field(default_factory=lambda: Engine(step_tokens=1024))
    kv_bytes_per_token: int = 131_072
    #: Tokens of a KV block. The trace must have blocks of the same size.
    block_tokens: int = BLOCK_TOKENS
    engines_per_node: int = 8
    #: Whether each node has engines of both roles; otherwise all engines of a node have one role.
    mixed_nodes: bool = False
    link_bytes_s: float = 200e9
    inside_bytes_s: float = 300e9
    transfer_fixed_s: float = 0.005
    #: Seconds from the end of a prefill until the decode engine knows of it.
    handoff_s: float = 0.005
    #: Bytes of KV in the DRAM and on the disks of each node; 0 for none.
    store_bytes: float = 8e12
    store_bytes_s: float = 25e9
    store_fixed_s: float = 0.005

    def __post_init__(self) -> None:
        for name in ("kv_bytes_per_token", "block_tokens", "engines_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("link_bytes_s", "inside_bytes_s", "store_bytes_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("transfer_fixed_s", "handoff_s", "store_bytes", "store_fixed_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_bytes_per_token

    @property
    def store_blocks(self) -> int:
        """Number of blocks that fit in the store of one node."""
        return int(self.store_bytes // self.block_bytes)
