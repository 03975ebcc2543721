"""What the gateway costs: the same event streams with it and without it, in one run.

Three processes: a fake replica that streams tokens at a steady pace, a gateway before it, and this
client, which reads through the gateway and directly by turns.

    python -m benchmarks.gateway [--quick] [--json FILE]

Figures:
    ttft_added_ms.c1, ttft_added_ms.c64: median time to the first token, gateway minus direct;
    own_ms_p50: median of the gateway's own code before the request goes out, as it reports it;
    cpu_us_per_chunk: CPU time of the gateway's process by chunk relayed, requests' costs left out;
    cpu_us_per_request: CPU time of the gateway's process by request with one token;
    chunk_rate_vs_direct: tokens per second through the gateway divided by those without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import uvloop

from benchmarks.gateway.servers import TOKEN_GAP_S, process

STREAMS = 64
CHAT = "/v1/chat/completions"


@dataclass
class Load:
    """What one round saw."""

    ttft_s: list[float]
    chunks: int
    seconds: float
    cpu_s: float

    @property
    def chunk_rate(self) -> float:
        """Events per second."""
        return self.chunks / self.seconds


async def load(url: str, watched: psutil.Process, streams: int, requests: int, tokens: int) -> Load:
    """`streams` workers, each with `requests` requests of `tokens` tokens one after the other."""
    ttfts: list[float] = []
    chunks = 0
    messages = [{"role": "user", "content": "word " * 200}]
    body = json.dumps(
        {"model": "model", "messages": messages, "stream": True, "max_tokens": tokens}
    ).encode()
    headers = {"content-type": "application/json"}

    async def worker(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal chunks
        # Arrivals spread evenly: a burst would measure the queue for this machine's cores.
        await asyncio.sleep(TOKEN_GAP_S * tokens * number / streams)
        for _ in range(requests):
            began = time.perf_counter()
            async with session.post(url + CHAT, data=body, headers=headers) as response:
                response.raise_for_status()
                first = True
                async for chunk in response.content.iter_any():
                    if first:
                        ttfts.append(time.perf_counter() - began)
                        first = False
                    chunks += chunk.count(b"\n\n")

    def cpu() -> float:
        times = watched.cpu_times()
        return float(times.user + times.system)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        before, began = cpu(), time.perf_counter()
        await asyncio.gather(*(worker(session, number) for number in range(streams)))
        return Load(ttfts, chunks, time.perf_counter() - began, cpu() - before)


async def measure(
    direct: str, gateway: str, watched: psutil.Process, rounds: int
) -> dict[str, float]:
    """The figures, from `rounds` rounds with the arms taking turns."""
    seen: dict[tuple[str, str], list[Load]] = {}
    shapes = {"c1": (1, 100, 1), "c64": (STREAMS, 3, 100), "burst": (8, 100, 1)}
    for url in (direct, gateway):
        await load(url, watched, 8, 5, 2)
    for number in range(rounds):
        arms = [("direct", direct), ("gateway", gateway)]
        for name, shape in shapes.items():
            for arm, url in arms if number % 2 else reversed(arms):
                seen.setdefault((arm, name), []).append(await load(url, watched, *shape))

    def ttft_ms(arm: str, name: str) -> float:
        return 1e3 * statistics.median(t for one in seen[arm, name] for t in one.ttft_s)

    def rate(arm: str) -> float:
        return statistics.median(one.chunk_rate for one in seen[arm, "c64"])

    short = seen["gateway", "burst"]
    per_request_s = sum(one.cpu_s for one in short) / sum(len(one.ttft_s) for one in short)
    long = seen["gateway", "c64"]
    chunks_cpu_s = sum(one.cpu_s - per_request_s * len(one.ttft_s) for one in long)
    async with aiohttp.ClientSession() as session, session.get(gateway + "/metrics") as response:
        own = json.loads(await response.read())
    figures = {"own_ms_p50": 1e3 * statistics.median(own)}
    for name in ("c1", "c64"):
        figures[f"ttft_direct_ms.{name}"] = ttft_ms("direct", name)
        figures[f"ttft_gateway_ms.{name}"] = ttft_ms("gateway", name)
        figures[f"ttft_added_ms.{name}"] = ttft_ms("gateway", name) - ttft_ms("direct", name)
    figures["cpu_us_per_request"] = 1e6 * per_request_s
    figures["cpu_us_per_chunk"] = 1e6 * chunks_cpu_s / sum(one.chunks for one in long)
    figures["chunks_per_s_direct"] = rate("direct")
    figures["chunks_per_s_gateway"] = rate("gateway")
    figures["chunk_rate_vs_direct"] = rate("gateway") / rate("direct")
    return figures


def main() -> None:
    """Run, print a table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway")
    parser.add_argument("--quick", action="store_true", help="one round in place of five")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    with process("replica") as (direct, _), process("gateway", direct) as (gateway, watched):
        figures = uvloop.run(measure(direct, gateway, watched, 1 if args.quick else 5))
    print("| figure | value |\n|---|---:|")
    for name, value in figures.items():
        print(f"| {name} | {value:.3f} |")
    if args.json:
        args.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
