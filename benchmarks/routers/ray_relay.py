"""Ray Serve's prefix-affinity policy in a small relay: ``benchmarks.routers.ray_relay URL ...``.

The tree is Ray's own (`PrefixTree` of `ray.serve.llm`'s `PrefixCacheAffinityRouter`, defaults and
all); what stands around it is not: Serve's handles, the tree's actor with its blocking calls, and
the proxy's 50 ms batches of chunks are left out, which flatters it. Of the replicas that match the
prompt best the one with the fewest requests is taken; where less than a tenth of the prompt
matches, of those whose part of the tree is smallest.

It prints its port as one line of JSON, and lives until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

from benchmarks.routers.http import Exchange, serve

MATCH_RATE = 0.1
_END = b"0\r\n\r\n"


class _Prompt(msgspec.Struct):
    prompt: str


_decode = msgspec.json.Decoder(_Prompt).decode


class _Upstream(asyncio.Protocol):
    """A kept connection to an engine; copies what comes to one client at a time."""

    def __init__(self, relay: Relay, url: str) -> None:
        self._relay, self._url = relay, url
        self._transport: asyncio.Transport | None = None
        self._client: Exchange | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._over(False)

    def data_received(self, data: bytes) -> None:
        if self._client is None:
            return
        self._client.write(data)
        self._tail = (self._tail + data)[-8:]
        if self._tail.endswith(_END):
            self._over(True)

    def ask(self, client: Exchange, data: bytes) -> None:
        """Send a client's request."""
        assert self._transport is not None
        self._client, self._tail = client, b""
        client.on_lost = self._transport.close
        self._transport.write(data)

    def _over(self, kept: bool) -> None:
        if self._client is not None:
            self._client.on_lost = None
            if not kept:
                self._client.close()
            self._client = None
            self._relay.ended(self._url, self if kept else None)


class Relay:
    """Chooses, and copies bytes."""

    def __init__(self, urls: list[str]) -> None:
        self._tree = PrefixTree()
        self._tree.add_tenants(urls, time.time())
        self._queues = dict.fromkeys(urls, 0)
        self._idle: dict[str, list[_Upstream]] = {url: [] for url in urls}
        self._tasks: set[asyncio.Task[None]] = set()

    def choose(self, text: str) -> str:
        """Choose like `PrefixCacheAffinityRouter` without a limit for imbalance, its default."""
        matched, tenants = self._tree.prefix_match(text, list(self._queues))
        if len(matched) < MATCH_RATE * len(text):
            tenants = self._tree.get_smallest_tenants()
        among = tenants or random.sample(list(self._queues), 2)
        return str(min(among, key=lambda url: self._queues[url]))

    def handle(self, asked: Exchange) -> None:
        """Relay a completion."""
        if asked.path != "/v1/completions":
            asked.json({})
            return
        text = _decode(asked.body).prompt
        url = self.choose(text)
        self._queues[url] += 1
        self._tree.insert(text, url, time.time())
        head = (
            f"POST {asked.path} HTTP/1.1\r\nhost: emulated\r\ncontent-type: application/json\r\n"
            f"content-length: {len(asked.body)}\r\n\r\n"
        )
        task = asyncio.create_task(self._ask(url, asked, head.encode() + asked.body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def ended(self, url: str, upstream: _Upstream | None) -> None:
        """An answer is over."""
        self._queues[url] -= 1
        if upstream is not None:
            self._idle[url].append(upstream)

    async def _ask(self, url: str, asked: Exchange, data: bytes) -> None:
        if self._idle[url]:
            upstream = self._idle[url].pop()
        else:
            parts = urlsplit(url)
            _, upstream = await asyncio.get_running_loop().create_connection(
                lambda: _Upstream(self, url), str(parts.hostname), int(parts.port or 80)
            )
        upstream.ask(asked, data)


async def run(urls: list[str]) -> None:
    """Serve until the standard input ends."""
    _, port = await serve(Relay(urls).handle)
    print(json.dumps({"url": f"http://127.0.0.1:{port}"}))
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    """See the module."""
    uvloop.run(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
