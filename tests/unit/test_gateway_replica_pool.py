"""The gateway's list of replicas: who is on it, and what several gateways know of each other."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

from headrace.gateway.backend import Backend, ReplicaInfo
from headrace.gateway.replica_pool import MIN_POLL_INTERVAL_S, POLL_INTERVAL_S, Lease, ReplicaPool


@dataclass
class Replicas:
    """Replicas whose load is that of all gateways."""

    names: list[str] = field(default_factory=lambda: ["a", "b"])
    in_flight: Counter[str] = field(default_factory=Counter)
    asked: int = 0

    async def replicas(self) -> list[ReplicaInfo]:
        self.asked += 1
        return [
            ReplicaInfo(name, f"http://{name}", in_flight=self.in_flight[name])
            for name in self.names
        ]


async def ready_pool(cluster: Replicas) -> ReplicaPool:
    pool = ReplicaPool(cast(Backend, cluster))
    await pool.ready()
    return pool


async def asked_again(cluster: Replicas, within_s: float) -> None:
    before = cluster.asked
    async with asyncio.timeout(within_s):
        while cluster.asked == before:
            await asyncio.sleep(0.01)


def send(pool: ReplicaPool, cluster: Replicas, key: bytes = b"") -> Lease:
    lease = pool.try_lease(key)
    assert lease is not None
    cluster.in_flight[lease.replica.replica_id] += 1
    return lease


async def test_a_replica_that_drains_gets_nothing_more_at_once() -> None:
    cluster = Replicas()
    pool = await ready_pool(cluster)
    pool.set_members(frozenset("b"))
    chosen = {send(pool, cluster, b"%d" % n).replica.replica_id for n in range(20)}
    assert chosen == {"b"}
    await asked_again(cluster, POLL_INTERVAL_S)  # it still answers, as it finishes what it has
    assert send(pool, cluster).replica.replica_id == "b"
    await pool.aclose()


async def test_a_new_replica_is_asked_for_its_address_at_once() -> None:
    cluster = Replicas(["a"])
    pool = await ready_pool(cluster)
    await asyncio.sleep(MIN_POLL_INTERVAL_S)
    cluster.names.append("b")
    pool.set_members(frozenset("ab"))
    await asked_again(cluster, POLL_INTERVAL_S / 2)
    assert await pool.ready() == 2
    await pool.aclose()


async def test_without_a_word_of_serve_the_list_is_what_answers() -> None:
    pool = await ready_pool(Replicas())
    assert await pool.ready() == 2
    await pool.aclose()


async def test_who_is_told_of_each_look_and_fails_does_not_end_them() -> None:
    cluster, told = Replicas(), list[int]()

    def fail() -> None:
        told.append(cluster.asked)
        raise RuntimeError("no metrics today")

    pool = ReplicaPool(cast(Backend, cluster), fail)
    assert await pool.ready() == pool.ready_now == 2
    pool.set_members(frozenset({"a"}))
    await asked_again(cluster, 2 * MIN_POLL_INTERVAL_S + 1.0)
    assert len(told) == 1
    await pool.aclose()


async def test_two_gateways_spread_a_burst_as_one_would() -> None:
    cluster = Replicas(["a", "b", "c"])
    pools = [await ready_pool(cluster) for _ in range(2)]
    for turn in range(30):  # one prefix, so that ties go to one replica
        send(pools[turn % 2], cluster, b"the same prompt")
    assert max(cluster.in_flight.values()) - min(cluster.in_flight.values()) <= 2
    for pool in pools:
        await pool.aclose()


async def test_a_gateway_leaves_alone_what_another_one_keeps_busy() -> None:
    cluster = Replicas()
    busy, idle = [await ready_pool(cluster) for _ in range(2)]
    cluster.names = ["a"]
    busy.set_members(frozenset("a"))
    leases = [send(busy, cluster) for _ in range(10)]
    cluster.names = ["a", "b"]
    await asked_again(cluster, 2 * POLL_INTERVAL_S)
    await asyncio.sleep(POLL_INTERVAL_S)
    chosen = Counter(send(idle, cluster).replica.replica_id for _ in range(10))
    assert chosen == {"b": 10}
    assert len(leases) == 10
    for pool in (busy, idle):
        await pool.aclose()


async def test_the_load_that_a_gateway_made_itself_is_not_counted_as_anothers() -> None:
    cluster = Replicas()
    pool = await ready_pool(cluster)
    leases: list[Any] = [send(pool, cluster) for _ in range(10)]
    await asyncio.sleep(1.5 * POLL_INTERVAL_S)
    for lease in leases:
        if lease.replica.replica_id == "a":
            lease.release()  # the replica has not told yet that it is idle
    chosen = Counter(send(pool, cluster).replica.replica_id for _ in range(5))
    assert chosen == {"a": 5}
    await pool.aclose()
