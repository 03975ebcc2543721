"""Whether wrong KV is caught on its way from prefill to decode, and what that costs.

    python -m benchmarks.integrity [--app] --json FILE

Blocks have the shape of SmolLM2-135M's on a CPU (2.95 MB). Bits are flipped in blocks after their
fingerprints were made; the same code as in an engine compares. Some flips go through a real pull
over NIXL. With `--app` the laptop's app is started, prompts are prefilled remotely, and what proofs
took is read from its decode engine, beside the time to the first token.

    integrity.flips_caught       of 10,000 flips in blocks (target 1)
    integrity.pulled_caught      of the flips that went through a pull
    integrity.record_us          a transfer: reading the record and believing it
    integrity.sum_us_per_block   fingerprint of one block, one thread; beside it memcpy of it
    integrity.detect_...         transfers until a peer that spoils 1 block in 100 is seen
    integrity.ttft_share         cost at the default rate / time to first token (target 0.01)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.instance import running_instance
from benchmarks.integrity.detect import simulated, transfers_until_seen
from benchmarks.integrity.pair import Consumer, Producer, Shape, agent
from benchmarks.serving.environment import environment
from headrace_engine.pull_proof.content import BlockSums, block_seeds
from headrace_engine.pull_proof.identity import Identity
from headrace_engine.pull_proof.settings import IntegritySettings

SMOLLM2 = Shape(layers=30, blocks=16, heads=3, tokens=128, width=64)
FLIPS, PULLED_FLIPS, PULLS = 10_000, 200, 300
PROMPT = list(range(1500))
APP_PROMPTS, APP_TOKENS = 60, 900
SPOILED = 0.01


def flips(count: int) -> int:
    """Return how many of so many flips, one at a time, change the fingerprint of their block."""
    caches = SMOLLM2.caches()
    for cache in caches.values():
        cache.copy_(torch.randn_like(cache, dtype=torch.float32))
    sums, identity = BlockSums(caches, SMOLLM2.blocks), Identity(b"i" * 16, 1, b"d" * 16, 1, True)
    draw, layers, caught = np.random.default_rng(1), list(caches.values()), 0
    every = list(range(SMOLLM2.blocks))
    seeds = block_seeds(identity, every)
    made = sums.of(every, seeds)
    for _ in range(count):
        block, layer = int(draw.integers(SMOLLM2.blocks)), layers[draw.integers(len(layers))]
        place = layer[block].view(torch.uint8).view(-1)
        at, bit = int(draw.integers(place.numel())), 1 << int(draw.integers(8))
        place[at] ^= bit
        caught += int(sums.of([block], seeds[[block]])[0] != made[block])
        place[at] ^= bit
    assert (sums.of(every, seeds) == made).all()
    sums.close()
    return caught


def pulls() -> dict[str, float]:
    """Flips through real pulls, and what a proof adds to a pull."""
    producer = Producer(agent("producer"), SMOLLM2)
    consumer = Consumer(agent("consumer"), producer)
    draw, theirs, ours = np.random.default_rng(2), [3, 4, 5, 6], [1, 2, 7, 9]
    caught = 0
    for number in range(PULLED_FLIPS):
        claim = producer.prefill("f", PROMPT, theirs, demanded=True)
        layers = list(producer.caches.values())
        layer, block = layers[draw.integers(len(layers))], theirs[draw.integers(len(theirs))]
        place = layer[block].view(torch.uint8).view(-1)
        if number % 20:
            place[int(draw.integers(place.numel()))] ^= 1 << int(draw.integers(8))
        wanted = "content" if number % 20 else "DONE"
        caught += int(consumer.pull(claim, theirs, ours) == wanted)
        producer.free("f")
    took: dict[bool, list[float]] = {False: [], True: []}
    consumer.agent.take_proved()
    for number in range(PULLS):
        claim = producer.prefill("p", PROMPT, theirs, demanded=bool(number % 2))
        assert consumer.pull(claim, theirs, ours) == "DONE"
        [(seconds, checked)] = consumer.agent.take_proved()
        took[checked].append(seconds)
        producer.free("p")
    seeds, sums = block_seeds(claim.identity, range(4)), []
    copies, source = [], np.zeros(SMOLLM2.blocks * 2**20, np.uint8)
    target = np.empty_like(source)
    for _ in range(50):
        started = time.perf_counter()
        producer.sums.of(theirs, seeds)
        sums.append((time.perf_counter() - started) / len(theirs))
        started = time.perf_counter()
        np.copyto(target, source)
        copies.append((time.perf_counter() - started) / source.nbytes)
    block_bytes = sum(cache[0].nbytes for cache in producer.caches.values())
    return {
        "integrity.pulled_caught": caught / PULLED_FLIPS,
        "integrity.record_us": 1e6 * statistics.median(took[False]),
        "integrity.checked_us_4_blocks": 1e6 * statistics.median(took[True]),
        "integrity.sum_us_per_block": 1e6 * statistics.median(sums),
        "integrity.memcpy_us_per_block": 1e6 * block_bytes * statistics.median(copies),
    }


def detection() -> dict[str, float]:
    """Transfers of 4 and of 16 blocks until a peer is seen that spoils one block in 100."""
    rate = IntegritySettings().rate
    found: dict[str, float] = {}
    for blocks in (4, 16):
        mean, late = simulated(SPOILED, blocks, rate, 300, blocks)
        name = f"integrity.detect_transfers_{blocks}_blocks"
        found |= {
            name: transfers_until_seen(SPOILED, blocks, rate),
            f"{name}_simulated": mean,
            f"{name}_p95": late,
            f"{name}_checking_all": transfers_until_seen(SPOILED, blocks, 1.0),
        }
    return found


def app(model: str) -> dict[str, float]:
    """Return the time of proofs in the laptop's app, and the time to the first token."""
    # Every second transfer is checked, so that both kinds are seen under the same load.
    settings = ["integrity.rate=0.5", "store.enabled=false", "speculation.enabled=false"]
    with (
        running_instance("integrity", settings, model) as instance,
        httpx.Client(base_url=instance.endpoint, timeout=120) as client,
    ):
        client.put("/headrace/v1/router", json={"policy": "remote"}).raise_for_status()
        alone = [_ttft_s(client, instance.model) for _ in range(APP_PROMPTS)]
        alone_proofs = _proofs(client)
        with ThreadPoolExecutor(8) as pool:
            busy = list(pool.map(lambda _: _ttft_s(client, instance.model, 16), range(APP_PROMPTS)))
        proofs = _proofs(client)
    later = {k: proofs[k] - alone_proofs[k] for k in proofs}
    rate = IntegritySettings().rate
    return {
        **_shares("integrity", alone_proofs, statistics.mean(alone), rate),
        **_shares("integrity.busy", later, statistics.mean(busy), rate),
        "integrity.app_unproved": proofs["unproved"],
    }


def _shares(name: str, proofs: dict[str, float], ttft_s: float, rate: float) -> dict[str, float]:
    plain = proofs["proved"] - proofs["checked"]
    identity_s = proofs["identity_s"] / max(1.0, plain)
    checked_s = proofs["checked_s"] / max(1.0, proofs["checked"])
    cost_s = identity_s + rate * (checked_s - identity_s)
    return {
        f"{name}.ttft_ms": 1e3 * ttft_s,
        f"{name}.identity_ms": 1e3 * identity_s,
        f"{name}.checked_ms": 1e3 * checked_s,
        f"{name}.ttft_share": cost_s / ttft_s,
        f"{name}.ttft_share_checking_all": checked_s / ttft_s,
    }


def _ttft_s(client: httpx.Client, model: str, tokens: int = 2) -> float:
    prompt = np.random.default_rng().integers(1000, 40_000, APP_TOKENS).tolist()
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True}
    started = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data:"))
        took = time.perf_counter() - started
        for _ in lines:
            pass
    return took


def _proofs(client: httpx.Client) -> dict[str, float]:
    time.sleep(1.0)
    replicas = client.get("/headrace/v1/status").raise_for_status().json()["replicas"]
    [nixl] = [replica["nixl"] for replica in replicas if replica["role"] == "decode"]
    counts, seconds = nixl["proofs"], nixl["proof_seconds"]
    return {
        "proved": float(counts.get("proved", 0)),
        "checked": float(counts.get("checked", 0)),
        "unproved": float(sum(n for kind, n in counts.items() if kind.startswith("unproved"))),
        "identity_s": seconds.get("identity", 0.0),
        "checked_s": seconds.get("checked", 0.0),
    }


def main() -> int:
    """Measure, print, write; 1 if a flip passed or the app did not start."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.integrity")
    parser.add_argument("--flips", type=int, default=FLIPS, help="bits to flip in blocks")
    parser.add_argument("--app", action="store_true", help="measure the laptop's app as well")
    parser.add_argument("--model", help="a model folder, a known name or a hub id")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    from headrace.model import resolve

    model = str(resolve(args.model))
    figures: dict[str, Any] = {"integrity.flips_caught": flips(args.flips) / args.flips}
    figures |= pulls() | detection()
    try:
        if args.app:
            figures |= app(model)
    except (RuntimeError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, value in figures.items():
        print(f"{name:48} {value:.6g}")
    if args.json:
        document = {"figures": figures, "environment": environment(model)}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    caught = figures["integrity.flips_caught"], figures["integrity.pulled_caught"]
    return 0 if caught == (1.0, 1.0) else 1


if __name__ == "__main__":
    raise SystemExit(main())
