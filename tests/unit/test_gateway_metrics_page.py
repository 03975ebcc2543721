"""`GET /metrics`: the filter by name, and how often the metrics are collected."""

from __future__ import annotations

import asyncio

from tests.unit.gateway_fakes import FakeCluster, answer, gateway_over

PAGE = b"""\
# HELP ray_seconds Time.
# TYPE ray_seconds histogram
ray_seconds_bucket{le="1"} 3
ray_seconds_sum 2.5
ray_seconds_count 3
# HELP ray_seconds_of Time of work.
# TYPE ray_seconds_of gauge
ray_seconds_of{what="work"} 1
ray_untyped 1
"""


async def test_metrics_are_filtered_by_name() -> None:
    class Several(FakeCluster):
        async def metrics(self) -> bytes:
            return PAGE

    async with gateway_over(answer, backend=Several()) as bench:

        async def ask(*names: str) -> list[str]:
            params = [("name[]", name) for name in names]
            async with bench.client.get("/metrics", params=params) as response:
                assert response.status == 200
                return (await response.text()).splitlines()

        page = PAGE.decode().splitlines()
        assert await ask() == page
        assert await ask("ray_seconds") == page[:5] == await ask("ray_seconds_bucket")
        assert await ask("ray_seconds_of", "ray_untyped") == page[5:]
        assert await ask("ray_seconds", "ray_untyped") == [*page[:5], page[-1]]
        assert await ask("ray") == []


async def test_metrics_are_collected_once_a_second_however_many_ask() -> None:
    class Counting(FakeCluster):
        pages = 0

        async def metrics(self) -> bytes:
            self.pages += 1
            await asyncio.sleep(0.05)
            return b"ray_headrace_x 1\n"

    cluster = Counting()
    async with gateway_over(answer, backend=cluster) as bench:

        async def ask() -> bytes:
            async with bench.client.get("/metrics") as response:
                return await response.read()

        assert set(await asyncio.gather(*(ask() for _ in range(20)))) == {b"ray_headrace_x 1\n"}
        assert cluster.pages == 1
