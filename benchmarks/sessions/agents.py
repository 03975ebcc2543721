"""A generated trace of agents: sessions whose contexts grow by turns, with tool calls in between.

Parameters, with their sources:

- sessions begin as a Poisson process, `SESSIONS_PER_S`: hundreds are open at a time
- `SYSTEM_PROMPTS` kinds of agent, chosen as 1/rank; each has one system prompt (instructions and
  tools) of 2,048 to 8,192 tokens, shared by its sessions (assumed)
- a turn adds 200 to 2,000 tokens, log-uniform: the last answer and the tool's result (assumed)
- a session ends after each turn with probability `END`, 20 turns on average, as the agents of
  `kvpolicy.workload.synthetic`, and at the latest at 65,536 tokens
- of the gaps between a turn's first token and the next turn, 95 % are below 10 s
  (vllm-project/router, issue 285): lognormal about the session's own median, log-uniform from 1 to
  5 s, drawn again if 10 s or more. The others (a person answers, a long build) have a Pareto tail
  from 10 s on with exponent 1, at most 1,800 s (assumed)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.kvpolicy.workload import Workload

SESSIONS_PER_S = 1.5
SYSTEM_PROMPTS = 8
SYSTEM_TOKENS = 2_048, 8_192
TURN_TOKENS = 200, 2_000
CONTEXT_TOKENS = 65_536
END = 0.05
SOON = 0.95
SOON_S = 10.0
MEDIAN_S = 1.0, 5.0
SPREAD = 0.6
LONGEST_S = 1_800.0


@dataclass(frozen=True)
class Session:
    """One agent's session.

    blocks: numbers of all its full blocks, root first, (n,). tokens: prompt tokens of each turn,
    (turns,). gaps_s: seconds from each turn's first token to the next turn, (turns - 1,).
    """

    start_s: float
    blocks: NDArray[np.int64]
    tokens: NDArray[np.int64]
    gaps_s: NDArray[np.float64]


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def gap_s(rng: np.random.Generator, median_s: float) -> float:
    """Return seconds until a session's next turn."""
    if rng.random() < SOON:
        while True:
            gap = float(median_s * np.exp(SPREAD * rng.standard_normal()))
            if gap < SOON_S:
                return gap
    return min(LONGEST_S, SOON_S / (1.0 - rng.random()))


def sessions(seed: int, seconds: float, block_tokens: int) -> list[Session]:
    """Return the sessions that begin within `seconds`."""
    rng = np.random.default_rng(seed)
    system = rng.integers(*SYSTEM_TOKENS, SYSTEM_PROMPTS, endpoint=True)
    popularity = 1.0 / np.arange(1, SYSTEM_PROMPTS + 1)
    popularity /= popularity.sum()
    ends = np.cumsum(system // block_tokens)
    fresh, start_s, found = int(ends[-1]), 0.0, []
    while True:
        start_s += rng.exponential(1.0 / SESSIONS_PER_S)
        if start_s >= seconds:
            return found
        kind = int(rng.choice(SYSTEM_PROMPTS, p=popularity))
        median_s = log_uniform(rng, *MEDIAN_S)
        context = int(system[kind])
        tokens, gaps = [], []
        while True:
            context += int(log_uniform(rng, *TURN_TOKENS))
            if context > CONTEXT_TOKENS:
                break
            tokens.append(context)
            if rng.random() < END:
                break
            gaps.append(gap_s(rng, median_s))
        shared = int(system[kind]) // block_tokens
        own = tokens[-1] // block_tokens - shared
        blocks = np.concatenate([np.arange(ends[kind] - shared, ends[kind]), fresh + np.arange(own)])
        fresh += own
        found.append(Session(start_s, blocks, np.array(tokens), np.array(gaps[: len(tokens) - 1])))


def as_workload(found: list[Session], seconds: float, block_tokens: int) -> Workload:
    """Return the turns that arrive within `seconds`, if every first token comes at once."""
    turns = [
        (float(at), session.blocks[: int(tokens) // block_tokens])
        for session in found
        for at, tokens in zip(
            session.start_s + np.concatenate([[0.0], np.cumsum(session.gaps_s)]),
            session.tokens,
            strict=True,
        )
        if at < seconds
    ]
    turns.sort(key=lambda turn: turn[0])
    starts = np.concatenate([[0], np.cumsum([len(blocks) for _, blocks in turns])])
    blocks = np.concatenate([blocks for _, blocks in turns])
    return Workload("agents", blocks, starts, np.array([at for at, _ in turns]))
