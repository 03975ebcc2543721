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

import math
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

    median_s: of its gaps below 10 s. blocks: numbers of all its full blocks, root first, (n,).
    tokens: prompt tokens of each turn, (turns,). gaps_s: seconds from each turn's first token to
    the next turn, (turns - 1,).
    """

    start_s: float
    median_s: float
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
    fresh, start_s = int(ends[-1]), 0.0
    found: list[Session] = []
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
        blocks = np.concatenate(
            [np.arange(ends[kind] - shared, ends[kind]), fresh + np.arange(own)]
        )
        fresh += own
        found.append(
            Session(start_s, median_s, blocks, np.array(tokens), np.array(gaps[: len(tokens) - 1]))
        )


def next_turn_by(age_s: NDArray[np.float64], median_s: float) -> NDArray[np.float64]:
    """Return the probability that a turn is followed by another within `age_s`, (n,)."""

    def lognormal(t_s: float) -> float:
        return 0.5 * (1.0 + math.erf(math.log(max(t_s, 1e-9) / median_s) / SPREAD / math.sqrt(2.0)))

    soon = np.array([min(1.0, lognormal(t) / lognormal(SOON_S)) for t in age_s.tolist()])
    late = np.where(age_s < LONGEST_S, 1.0 - SOON_S / np.maximum(age_s, SOON_S), 1.0)
    return np.asarray((1.0 - END) * (SOON * soon + (1.0 - SOON) * late))


def arrivals(found: list[Session], seconds: float) -> list[tuple[float, int, int]]:
    """Return time, session and turn of the turns that arrive within `seconds`, in order, if every
    first token comes at once."""
    turns = []
    for i, session in enumerate(found):
        at_s = session.start_s + np.concatenate([[0.0], np.cumsum(session.gaps_s)])
        turns += [(at, i, turn) for turn, at in enumerate(at_s.tolist()) if at < seconds]
    return sorted(turns)


def as_workload(found: list[Session], seconds: float, block_tokens: int) -> Workload:
    """Return the turns of `arrivals`."""
    turns = arrivals(found, seconds)
    chains = [found[i].blocks[: int(found[i].tokens[turn]) // block_tokens] for _, i, turn in turns]
    starts = np.concatenate([[0], np.cumsum([len(chain) for chain in chains])])
    at_s = np.array([at for at, _, _ in turns])
    return Workload("agents", np.concatenate(chains), starts, at_s)
