"""Workloads to replay: prompts as chains of blocks with arrival times, and costs of blocks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of a block, for a named model on a named machine.

    Llama-3-8B in 16 bits on one A100 80GB: 2 * 8.03e9 floating-point operations a token, and
    4 * 32 layers * 4096 for each pair of token and earlier token, at half of 312e12 a second;
    131,072 bytes of KV a token, loaded from host memory at 20 GB/s (PCIe 4.0 x16).
    """

    flops_token: float = 2 * 8.03e9
    flops_pair: float = 4 * 32 * 4096
    flops_s: float = 0.5 * 312e12
    kv_bytes_token: int = 131_072
    load_bytes_s: float = 20e9
    block_tokens: int = BLOCK_TOKENS

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_bytes_token

    @property
    def load_s(self) -> float:
        return self.block_bytes / self.load_bytes_s

    def compute_s(self, depth: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds to prefill a block that `depth` blocks stand before, causal within itself."""
        context = self.block_tokens * (np.asarray(depth) + 0.5)
        flops = self.block_tokens * (self.flops_token + self.flops_pair * context)
        return np.asarray(flops / self.flops_s, dtype=np.float64)


@dataclass(frozen=True)
class Workload:
    """Prompts in order of arrival.

    `blocks` holds the block numbers (0 .. distinct - 1) of all prompts end to end, root first;
    prompt i is `blocks[starts[i]:starts[i + 1]]` and arrives at `arrival_s[i]`. A block number
    stands for one prefix, so it has one depth and one parent.
    """

    name: str
    blocks: NDArray[np.int64]
    starts: NDArray[np.int64]
    arrival_s: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def distinct(self) -> int:
        return int(self.blocks.max(initial=-1)) + 1

    @property
    def depths(self) -> NDArray[np.int64]:
        """Depth of each entry of `blocks`."""
        return np.arange(len(self.blocks)) - np.repeat(self.starts[:-1], np.diff(self.starts))

    def endless_hits(self) -> NDArray[np.int64]:
        """Return the leading blocks of each prompt that an endless cache holds."""
        first_seen = np.full(self.distinct, len(self), np.int64)
        prompt = np.repeat(np.arange(len(self)), np.diff(self.starts))
        np.minimum.at(first_seen, self.blocks, prompt)
        # A prefix that was seen was seen whole, so the known blocks are the leading ones.
        return np.bincount(prompt, first_seen[self.blocks] < prompt, len(self)).astype(np.int64)


def from_chains(name: str, chains: list[list[int]], arrival_s: list[float]) -> Workload:
    """Number the blocks of `chains` (any integers) densely."""
    lengths = np.array([len(c) for c in chains], dtype=np.int64)
    flat = np.array([b for c in chains for b in c], dtype=np.int64)
    numbers = np.unique(flat, return_inverse=True)[1].reshape(-1).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Workload(name, numbers, starts, np.asarray(arrival_s, dtype=np.float64))


def read_trace(path: Path, *, partial_blocks: bool = False) -> Workload:
    """Return a trace in Mooncake's form: `timestamp` in ms, `input_length` in tokens, `hash_ids`.

    vLLM caches full blocks only, so a prompt's last block counts only if it is full, unless
    `partial_blocks` is set.
    """
    chains, arrival_s = [], []
    with path.open() as lines:
        for line in lines:
            request = json.loads(line)
            ids = request["hash_ids"]
            chains.append(ids if partial_blocks else ids[: request["input_length"] // BLOCK_TOKENS])
            arrival_s.append(request["timestamp"] / 1e3)
    return from_chains(path.stem, chains, arrival_s)


def synthetic(seed: int = 1, seconds: float = 3600.0) -> Workload:
    """Chats under shared system prompts, agents that call themselves quickly, and one-off scans.

    - 12 system prompts of 2 to 12 blocks, their popularity falling as 1/rank
    - chats: 1 new one a second; turns go on with probability 0.65 after 20 s plus a lognormal pause
      (median 60 s) and add 1 to 4 blocks
    - agents: 1 new one in 20 s; 20 steps on average, 4 to 12 s apart, adding 1 or 2 blocks
    - scans: 1 in 5 s, a document of 20 to 120 blocks that is never seen again
    """
    rng = np.random.default_rng(seed)
    systems = [list(range(-1000 * (s + 1), -1000 * (s + 1) + 2 + s)) for s in range(11)]
    systems.append(list(range(-20_000, -19_988)))
    popularity = 1.0 / np.arange(1, len(systems) + 1)
    popularity /= popularity.sum()
    fresh = iter(range(10**9))
    prompts: list[tuple[float, list[int]]] = []

    def add(chain: list[int], low: int, high: int) -> list[int]:
        return chain + [next(fresh) for _ in range(rng.integers(low, high + 1))]

    def starts(every_s: float) -> NDArray[np.float64]:
        return np.cumsum(rng.exponential(every_s, int(2 * seconds / every_s)))

    for t in starts(1.0):
        chain = add(systems[rng.choice(len(systems), p=popularity)], 1, 12)
        while t < seconds:
            prompts.append((t, chain))
            if rng.random() > 0.65:
                break
            t += 20.0 + rng.lognormal(np.log(60.0), 1.0)
            chain = add(chain, 1, 4)
    for t in starts(20.0):
        chain = add(systems[rng.integers(len(systems))], 2, 20)
        while t < seconds:
            prompts.append((t, chain))
            if rng.random() < 0.05:
                break
            t += rng.uniform(4.0, 12.0)
            chain = add(chain, 1, 2)
    for t in starts(5.0):
        if t < seconds:
            prompts.append((t, add([], 20, 120)))
    prompts.sort(key=lambda p: p[0])
    return from_chains("synthetic", [p[1] for p in prompts], [p[0] for p in prompts])
