"""Costs of the router's index: learning from events, memory, and look-ups.

- ``events.per_s``: blocks a second from encoded batches to the index, half stored, half removed.
  Batches are as vLLM 0.29 sends them: a run of 16 to 64 blocks of 16 tokens is one event with its
  token ids, a removed block is an event of its own. ``_of_numbers``: hashes sent as 64-bit numbers,
  vLLM's default; else 32 bytes each.
- ``index.bytes_per_entry``: a million blocks with one holder each, by the index's own count;
  ``resident_bytes_per_entry``: by the growth of the process. Sharing reduces it:
  ``staggered`` are 100 holders of prefixes of one prompt; ``scattered``, the worst, are blocks with
  three holders of 1,000 each, drawn at random.
- ``match_vs_dynamo``: the longest prefix of each of 100 workers, which hold prefixes of different
  length, for prompts of 6,250 blocks, over the time of Dynamo's ``RadixTree.find_matches`` for the
  same. The two are asked in turn with what their own hashing gives: an array here, a list there.
- ``match.N``: the same for N holders, in an index that also has a million other blocks.
- ``hash``: 100,000 tokens to vLLM's ``sha256_cbor`` hashes at 16 tokens a block, beside vLLM's own
  loop, a chain of BLAKE3 (``vs_blake3``) and Dynamo's hash, which is not vLLM's.
- ``hub_ms``: a block that 100,000 blocks follow, held by 100 engines, is removed from an engine
  that has none of those blocks; the index looks at all of them.

Times are CPU seconds of the thread, so other programs on the machine count less; beside Dynamo,
whose tree may answer in a thread of its own, they are by the clock for both.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from headrace.router.blocks.block_index import BlockIndex
from headrace.router.blocks.kv_events import KvEventProcessor
from tests.support.prompt_keys import PromptKeys

BLOCK_TOKENS, TOKENS = 16, 100_000
BLOCKS = TOKENS // BLOCK_TOKENS
WORKERS = 100
Keys = NDArray[np.uint64]


def measure(report: dict[str, Any]) -> None:
    """Add the figures to a report; print a line on what is left out."""
    _events(numbers=False, engines=1, steps=20)  # compiles
    report["events"] = _events(numbers=False)
    report["events"] |= {f"{k}_of_numbers": v for k, v in _events(numbers=True).items()}
    report["index"] = _memory()
    report["match"] = {str(holders): _match(holders) for holders in (100, 1000, 1300)}
    report["match"]["hub_ms"] = 1e3 * _hub()
    report["hash"] = _hash()
    dynamo = _dynamo()
    if dynamo is None:
        print(
            "match_vs_dynamo is left out: Dynamo is not installed. Have it in a folder of its own: "
            "pip install --no-deps --target DIR ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1, "
            "and DYNAMO_TARGET=DIR"
        )
        return
    report["match"] |= _beside_dynamo(dynamo)
    report["match_vs_dynamo"] = report["match"]["ours_us"] / report["match"]["dynamo_us"]
    tokens = _tokens(0)
    report["hash"]["dynamo_ms"] = 1e3 * _median(
        lambda: dynamo.compute_block_hash_for_seq(tokens, BLOCK_TOKENS)
    )


# Events


def _event(kind: str, hashes: list[Any], **more: Any) -> dict[str, Any]:
    return {"type": kind, "block_hashes": hashes, "medium": "GPU", "group_idx": 0, **more}


def _events(numbers: bool, engines: int = 16, steps: int = 400) -> dict[str, float]:
    rng = random.Random(0)
    stored: list[tuple[str, int, bytes]] = []
    removed: list[tuple[str, int, bytes]] = []
    blocks = 0

    def name() -> Any:
        return rng.getrandbits(64) if numbers else rng.randbytes(32)

    for engine in range(engines):
        parent: Any = None
        for step in range(steps):
            hashes = [name() for _ in range(rng.randrange(16, 65))]
            tokens = [rng.randrange(128_000) for _ in range(BLOCK_TOKENS * len(hashes))]
            run = _event(
                *("BlockStored", hashes),
                parent_block_hash=parent,
                token_ids=tokens,
                block_size=BLOCK_TOKENS,
                lora_id=None,
                lora_name=None,
            )
            parent = hashes[-1] if step % 10 != 9 else None
            stored.append((str(engine), step, msgspec.msgpack.encode([0.0, [run], 0])))
            gone = [_event("BlockRemoved", [each]) for each in reversed(hashes)]
            removed.append((str(engine), steps, msgspec.msgpack.encode([0.0, gone, 0])))
            blocks += len(hashes)
    rng.shuffle(stored)
    stored.sort(key=lambda batch: batch[1])
    removed = [(engine, 2 * steps - 1 - i % steps, b) for i, (engine, _, b) in enumerate(removed)]
    removed.sort(key=lambda batch: batch[1])

    index = BlockIndex()
    events = KvEventProcessor(index)
    for engine in range(engines):
        events.add_source(str(engine), "1", 0.0)
    seconds = []
    for batches in (stored, removed):
        begin = time.thread_time()
        for source, seq, payload in batches:
            events.on_batch(source, "1", seq, payload, 0.0)
        seconds.append(time.thread_time() - begin)
        if batches is stored and index.blocks != blocks:
            raise RuntimeError(f"{index.blocks} blocks are known, not {blocks}")
    if index.blocks:
        raise RuntimeError(f"{index.blocks} blocks are left")
    return {
        "per_s": 2 * blocks / sum(seconds),
        "stored_per_s": blocks / seconds[0],
        "removed_per_s": blocks / seconds[1],
    }


# Memory


def _memory() -> dict[str, float]:
    rng, blocks = np.random.default_rng(0), 1_000_000
    gc.collect()
    before = psutil.Process().memory_info().rss
    index = BlockIndex()
    holder = index.open()
    _fill(index, [holder], rng, blocks)
    resident = psutil.Process().memory_info().rss - before
    found = {
        "bytes_per_entry": index.bytes / index.entries,
        "resident_bytes_per_entry": resident / index.entries,
    }
    index = BlockIndex()
    holders = [index.open() for _ in range(WORKERS)]
    for _ in range(20):
        _stagger(index, holders, rng)
    found["staggered_bytes_per_entry"] = index.bytes / index.entries
    index = BlockIndex()
    holders = [index.open() for _ in range(1000)]
    for key in rng.integers(1, 1 << 63, (100_000, 1), np.uint64):
        for holder in rng.choice(holders, 3, replace=False):
            index.stored(int(holder), None, key)
    found["scattered_bytes_per_entry"] = index.bytes / index.entries
    found["dropped"] = index.dropped
    return found


def _fill(index: BlockIndex, holders: list[int], rng: np.random.Generator, blocks: int) -> None:
    keys = rng.integers(1, 1 << 63, blocks, np.uint64)
    for i in range(0, blocks, 50):
        index.stored(holders[i // 50 % len(holders)], None, keys[i : i + 50])


def _stagger(index: BlockIndex, holders: list[int], rng: np.random.Generator) -> Keys:
    """Return a prompt of which each holder has another part, in random order."""
    keys = rng.integers(1, 1 << 63, BLOCKS, np.uint64)
    for i, holder in enumerate(rng.permutation(holders)):
        index.stored(int(holder), None, keys[: BLOCKS * (i + 1) // len(holders)])
    return keys


# Questions


def _match(holders: int, prompts: int = 20, rounds: int = 50) -> dict[str, float]:
    rng = np.random.default_rng(holders)
    index = BlockIndex()
    numbers = [index.open() for _ in range(holders)]
    _fill(index, numbers, rng, 1_000_000)
    asked = [_stagger(index, numbers, rng) for _ in range(prompts)]
    times = []
    for _ in range(rounds):
        for keys in asked:
            begin = time.thread_time()
            index.match(keys)
            times.append(1e6 * (time.thread_time() - begin))
    return {"p50_us": float(np.percentile(times, 50)), "p99_us": float(np.percentile(times, 99))}


def _hub(children: int = 100_000) -> float:
    index = BlockIndex()
    holders = [index.open() for _ in range(WORKERS)]
    hub, *keys = np.random.default_rng(0).integers(1, 1 << 63, children + 1, np.uint64)
    for holder in holders:
        index.stored(holder, None, np.array([hub]))
    for i, key in enumerate(keys):
        index.stored(holders[i % (WORKERS - 1)], int(hub), np.array([key]))
    begin = time.thread_time()
    index.removed(holders[-1], np.array([hub]))
    return time.thread_time() - begin


def _dynamo() -> Any:
    """Dynamo's library; None if it is not there."""
    target = os.environ.get("DYNAMO_TARGET")
    if target and target not in sys.path:
        sys.path.append(target)
    try:
        from dynamo import llm  # type: ignore[import-not-found]
    except ImportError:
        return None
    return llm


def _beside_dynamo(dynamo: Any, rounds: int = 200) -> dict[str, float]:
    index, tree = BlockIndex(), dynamo.RadixTree()
    holders = [index.open() for _ in range(WORKERS)]
    names = dynamo.compute_block_hash_for_seq(_tokens(1), BLOCK_TOKENS)
    keys = np.array([name % 2**64 for name in names], np.uint64)
    for worker in holders:
        blocks = BLOCKS * (worker + 1) // WORKERS
        index.stored(worker, None, keys[:blocks])
        told = [{"block_hash": i + 1, "tokens_hash": names[i]} for i in range(blocks)]
        event = {"event_id": 0, "dp_rank": 0}
        event["data"] = {"stored": {"parent_hash": None, "blocks": told}}  # type: ignore[assignment]
        tree.apply_event(worker, json.dumps(event).encode())
    scores = tree.find_matches(names).scores
    theirs = {worker: blocks for (worker, _), blocks in scores.items()}
    if theirs != dict(enumerate(index.match(keys).tolist())):
        raise RuntimeError("the two do not find the same")
    ours_us, dynamo_us = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        index.match(keys)
        middle = time.perf_counter()
        tree.find_matches(names)
        ours_us.append(1e6 * (middle - begin))
        dynamo_us.append(1e6 * (time.perf_counter() - middle))
    return {"ours_us": float(np.median(ours_us)), "dynamo_us": float(np.median(dynamo_us))}


# Hashes


def _tokens(seed: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(0, 128_000, TOKENS)]


def _median(call: Callable[[], object], rounds: int = 9) -> float:
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        call()
        times.append(time.thread_time() - begin)
    return float(np.median(times))


def _hash() -> dict[str, float]:
    tokens, hasher = _tokens(0), PromptKeys(BLOCK_TOKENS)
    found = {"ours_ms": 1e3 * _median(lambda: hasher.keys(tokens))}
    try:
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core import kv_cache_utils
    except ImportError:
        print("hash.vllm_ms is left out: vLLM is not installed")
    else:
        kv_cache_utils.init_none_hash(sha256_cbor)

        def vllm() -> None:
            parent = None
            for end in range(BLOCK_TOKENS, TOKENS + 1, BLOCK_TOKENS):
                parent = kv_cache_utils.hash_block_tokens(
                    sha256_cbor, parent, tokens[end - BLOCK_TOKENS : end], None
                )

        found["vllm_ms"] = 1e3 * _median(vllm)
        found["vs_vllm"] = found["ours_ms"] / found["vllm_ms"]
    try:
        from blake3 import blake3
    except ImportError:
        print("hash.vs_blake3 is left out: the package blake3 is not installed")
        return found

    def chain() -> None:
        data, parent = np.array(tokens, "<u4").tobytes(), bytes(32)
        for start in range(0, 4 * TOKENS, 4 * BLOCK_TOKENS):
            parent = blake3(parent + data[start : start + 4 * BLOCK_TOKENS]).digest()

    found["blake3_ms"] = 1e3 * _median(chain)
    found["vs_blake3"] = found["ours_ms"] / found["blake3_ms"]
    return found
