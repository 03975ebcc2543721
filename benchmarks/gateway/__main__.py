"""Cost of the gateway: the same event streams with it and without it, in one run.

It also measures what API keys and TLS add. Five processes run: a fake replica that streams tokens
at a steady pace; two gateways in front of it, one of which requires API keys and TLS; a relay that
copies bytes without parsing them; and this client, which reads from all four in turns.

    python -m benchmarks.gateway [--quick] [--json FILE] [--markdown docs/benchmarks.md]

Figures:
    ttft_added_ms.c1, ttft_added_ms.c64: median time to the first token, gateway minus direct;
    own_ms_p50: median of the gateway's own code before the request goes out, as it reports it;
    cpu_us_per_chunk: CPU time of the gateway's process by chunk relayed, requests' costs left out;
    bare.cpu_us_per_chunk: the same of the bare relay: what the kernel and the event loop cost;
    own_cpu_us_per_chunk: the difference, which is the gateway's own;
    cpu_us_per_request: CPU time of the gateway's process by request with one token;
    chunk_rate_vs_direct: tokens per second through the gateway divided by those without it;
    closed.added_ms: median over rounds of what keys and TLS add to a whole request of one token on
        a kept connection, the client's half of TLS included; closed.added_ms_new is the same with a
        new connection for each request;
    closed.cpu_us_per_request, closed.cpu_us_per_chunk: what they add in the gateway's process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop

from benchmarks.gateway.servers import TOKEN_GAP_S, Running, closed, process
from benchmarks.serving.environment import machine
from benchmarks.serving.report import write_markdown

STREAMS = 64
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Shape:
    """`streams` clients, each with `requests` requests of `tokens` tokens one after the other."""

    streams: int
    requests: int
    tokens: int
    kept: bool = True
    """Whether a client keeps its connection."""


SHAPES = {
    "c1": Shape(1, 200, 1),
    "new": Shape(1, 100, 1, kept=False),
    "c64": Shape(STREAMS, 3, 100),
    "burst": Shape(8, 100, 1),
}


@dataclass
class Load:
    """Measurements of one round."""

    ttft_s: list[float]
    whole_s: list[float]
    chunks: int
    seconds: float
    cpu_s: float

    @property
    def chunk_rate(self) -> float:
        """Events per second."""
        return self.chunks / self.seconds


async def load(server: Running, shape: Shape) -> Load:
    """One round at a server."""
    ttfts: list[float] = []
    wholes: list[float] = []
    chunks = 0
    messages = [{"role": "user", "content": "word " * 200}]
    asked = {"model": "model", "messages": messages, "stream": True, "max_tokens": shape.tokens}
    body = json.dumps(asked).encode()
    headers = {"content-type": "application/json"}
    trust: ssl.SSLContext | bool = True
    if server.door.tls:
        headers["authorization"] = f"Bearer {server.door.key}"
        trust = ssl.create_default_context(cafile=server.door.authority)

    async def worker(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal chunks
        # Arrivals spread evenly: a burst would measure the queue for this machine's cores.
        await asyncio.sleep(TOKEN_GAP_S * shape.tokens * number / shape.streams)
        for _ in range(shape.requests):
            began = time.perf_counter()
            async with session.post(server.url + CHAT, data=body, headers=headers) as response:
                response.raise_for_status()
                first = True
                async for chunk in response.content.iter_any():
                    if first:
                        ttfts.append(time.perf_counter() - began)
                        first = False
                    chunks += chunk.count(b"\n\n")
            wholes.append(time.perf_counter() - began)

    def cpu() -> float:
        times = server.process.cpu_times()
        return float(times.user + times.system)

    connector = aiohttp.TCPConnector(limit=0, ssl=trust, force_close=not shape.kept)
    async with aiohttp.ClientSession(connector=connector) as session:
        before, began = cpu(), time.perf_counter()
        await asyncio.gather(*(worker(session, number) for number in range(shape.streams)))
        return Load(ttfts, wholes, chunks, time.perf_counter() - began, cpu() - before)


Seen = dict[tuple[str, str], list[Load]]


async def measure(servers: dict[str, Running], rounds: int) -> dict[str, float]:
    """Return the figures, from `rounds` rounds with the arms taking turns."""
    seen: Seen = {}
    for server in servers.values():
        await load(server, Shape(8, 5, 2))
    for number in range(rounds):
        for name, shape in SHAPES.items():
            arms = list(servers)
            for arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
                seen.setdefault((arm, name), []).append(await load(servers[arm], shape))
    async with (
        aiohttp.ClientSession() as session,
        session.get(servers["gateway"].url + "/metrics") as response,
    ):
        own = json.loads(await response.read())
    return {"own_ms_p50": 1e3 * statistics.median(own), **_gateway(seen), **_closed(seen)}


def _gateway(seen: Seen) -> dict[str, float]:
    """Return the figures of the gateway without keys and TLS."""

    def ttft_ms(arm: str, name: str) -> float:
        return 1e3 * statistics.median(t for one in seen[arm, name] for t in one.ttft_s)

    def rate(arm: str) -> float:
        return statistics.median(one.chunk_rate for one in seen[arm, "c64"])

    figures = {}
    for name in ("c1", "c64"):
        figures[f"ttft_direct_ms.{name}"] = ttft_ms("direct", name)
        figures[f"ttft_gateway_ms.{name}"] = ttft_ms("gateway", name)
        figures[f"ttft_added_ms.{name}"] = ttft_ms("gateway", name) - ttft_ms("direct", name)
    figures["cpu_us_per_request"] = 1e6 * _request_cpu_s(seen, "gateway")
    figures["cpu_us_per_chunk"] = 1e6 * _chunk_cpu_s(seen, "gateway")
    figures["bare.cpu_us_per_chunk"] = 1e6 * _chunk_cpu_s(seen, "bare")
    figures["own_cpu_us_per_chunk"] = figures["cpu_us_per_chunk"] - figures["bare.cpu_us_per_chunk"]
    figures["chunks_per_s_direct"] = rate("direct")
    figures["chunks_per_s_gateway"] = rate("gateway")
    figures["chunk_rate_vs_direct"] = rate("gateway") / rate("direct")
    return figures


def _closed(seen: Seen) -> dict[str, float]:
    """Return the figures of what keys and TLS add."""

    def added_ms(name: str) -> list[float]:
        rounds = zip(seen["closed", name], seen["gateway", name], strict=True)
        return [
            1e3 * (statistics.median(with_.whole_s) - statistics.median(without.whole_s))
            for with_, without in rounds
        ]

    def added_us(cost_s: Callable[[Seen, str], float]) -> float:
        return 1e6 * (cost_s(seen, "closed") - cost_s(seen, "gateway"))

    kept = added_ms("c1")
    return {
        "closed.added_ms": statistics.median(kept),
        "closed.added_ms_least": min(kept),
        "closed.added_ms_greatest": max(kept),
        "closed.added_ms_new": statistics.median(added_ms("new")),
        "closed.cpu_us_per_request": added_us(_request_cpu_s),
        "closed.cpu_us_per_chunk": added_us(_chunk_cpu_s),
    }


def _request_cpu_s(seen: Seen, arm: str) -> float:
    short = seen[arm, "burst"]
    return sum(one.cpu_s for one in short) / sum(len(one.ttft_s) for one in short)


def _chunk_cpu_s(seen: Seen, arm: str) -> float:
    long, request_s = seen[arm, "c64"], _request_cpu_s(seen, arm)
    spent_s = sum(one.cpu_s - request_s * len(one.ttft_s) for one in long)
    return spent_s / sum(one.chunks for one in long)


def main() -> None:
    """Run, print a table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway")
    parser.add_argument("--quick", action="store_true", help="one round in place of five")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="fill its own markers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, process() as replica:
        target, door = replica.url, closed(Path(folder))
        with (
            process(target) as gateway,
            process(target, door) as guarded,
            process(target, None) as bare,
        ):
            servers = {"direct": replica, "gateway": gateway, "closed": guarded, "bare": bare}
            figures = uvloop.run(measure(servers, 1 if args.quick else 5))
    about = machine()
    page = f"{about['date']}, {about['cpu']}, {about['cores']} cores.\n\n"
    page += "| figure | value |\n|---|---:|\n"
    page += "".join(f"| `{name}` | {value:.3f} |\n" for name, value in figures.items())
    print(page)
    if args.markdown:
        write_markdown(args.markdown, {"gateway": page})
    if args.json:
        args.json.write_text(
            json.dumps({"figures": figures, "environment": about}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
