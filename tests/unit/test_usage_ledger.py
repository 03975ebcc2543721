"""The ledger of usage: sums over hours and days, several gateways, replicas and faults."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config.conversations import ConversationSettings
from headrace.config.gateway import UsageSettings
from headrace.gateway.conversations.setup import StateSetup
from headrace.gateway.kept_records.record_store import RecordStore, StoreError
from headrace.gateway.kept_records.sqlite_store import SqliteStore
from headrace.gateway.usage import ledger as ledger_module
from headrace.gateway.usage.ledger import UsageLedger
from headrace.gateway.usage.replica_day import DAY_S, HOUR_S, ReplicaDay, decode, encode
from headrace.gateway.usage.setup import FILE, make_ledger
from tests.support.clock import Clock

START_S = 20_000 * DAY_S + 10 * HOUR_S
"""Ten o'clock of a day."""


class Bench:
    """Ledgers over one store, and replicas that report to all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, Clock(START_S)
        self.ledgers: list[UsageLedger] = []

    def ledger(self, ttl_s: float = 400 * DAY_S) -> UsageLedger:
        made = UsageLedger(lambda: SqliteStore(self.folder, ttl_s, 1 << 30, name=FILE), self.clock)
        self.ledgers.append(made)
        return made

    def report(self, ledger: UsageLedger, replica: str = "d1", **tenants: int) -> None:
        ledger.take(
            {
                "replica_id": replica,
                "model": "m",
                "since_s": START_S,
                "tenants": {name: {"computed_tokens": n} for name, n in tenants.items()},
            }
        )

    async def computed(
        self, ledger: UsageLedger, since_s: float = START_S, **options: Any
    ) -> dict[str, int]:
        until_s = options.pop("until_s", self.clock())
        sums = await ledger.sums(since_s, until_s, **options)
        return {one.tenant: one.usage.computed_tokens for one in sums}


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for ledger in made.ledgers:
        await ledger.aclose()


async def test_totals_become_sums_of_all_replicas(bench: Bench) -> None:
    ledger = bench.ledger()
    bench.report(ledger, "d1", shop=10, bank=1)
    bench.report(ledger, "d1", shop=25, bank=1)
    bench.report(ledger, "p1", shop=5)
    assert await bench.computed(ledger) == {"bank": 1, "shop": 30}
    assert await bench.computed(ledger, tenant="shop") == {"shop": 30}
    assert await bench.computed(ledger, model="other") == {}


async def test_hours_are_told_apart(bench: Bench) -> None:
    ledger = bench.ledger()
    for hour, total in ((0, 10), (1, 25), (3, 30)):
        bench.clock.now_s = START_S + hour * HOUR_S
        bench.report(ledger, shop=total)
    assert await bench.computed(ledger) == {"shop": 30}
    assert await bench.computed(ledger, START_S + HOUR_S) == {"shop": 20}
    assert await bench.computed(ledger, START_S + HOUR_S, until_s=START_S + HOUR_S) == {"shop": 15}
    assert await bench.computed(ledger, START_S + 4 * HOUR_S) == {}


async def test_a_day_begins_with_what_the_last_one_had(bench: Bench) -> None:
    ledger = bench.ledger()
    bench.report(ledger, shop=10)
    bench.clock.now_s += DAY_S
    bench.report(ledger, shop=12)
    bench.clock.now_s += 3 * DAY_S
    bench.report(ledger, shop=20)
    assert await bench.computed(ledger) == {"shop": 20}
    assert await bench.computed(ledger, START_S + DAY_S) == {"shop": 10}
    assert await bench.computed(ledger, START_S + 4 * DAY_S) == {"shop": 8}


async def test_the_next_gateway_continues_after_a_killed_one(bench: Bench) -> None:
    """Over a day's end too; what the replica did while there was no gateway is in its totals."""
    for days, total in ((0, 10), (0, 15), (2, 40), (2, 41)):
        bench.clock.now_s = START_S + days * DAY_S
        ledger = bench.ledger()
        bench.report(ledger, shop=total)
        assert await bench.computed(ledger) == {"shop": total}
    assert await bench.computed(ledger, START_S + DAY_S) == {"shop": 26}


async def test_two_gateways_count_a_replica_once(bench: Bench) -> None:
    first, second = bench.ledger(), bench.ledger()
    bench.report(first, shop=10)
    bench.report(second, shop=12)
    for ledger in (second, first, second):
        ledger.flush()
    bench.report(first, shop=12)
    bench.report(second, shop=13)
    assert await bench.computed(second) == {"shop": 13}
    bench.report(first, shop=13)
    assert await bench.computed(first) == {"shop": 13}


async def test_a_gateway_that_missed_an_hour_loses_nothing(bench: Bench) -> None:
    present, away = bench.ledger(), bench.ledger()
    for ledger in (present, away):
        bench.report(ledger, shop=10)
        ledger.flush()
    bench.clock.now_s += HOUR_S
    bench.report(present, shop=20)
    present.flush()
    bench.clock.now_s += HOUR_S
    bench.report(away, shop=30)
    assert await bench.computed(away) == {"shop": 30}


async def test_what_a_store_could_not_take_is_written_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bench.ledger()
    bench.report(ledger, shop=10)
    write = SqliteStore.write

    def fails(*args: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(SqliteStore, "write", fails)
    with pytest.raises(StoreError, match="the disk is full"):
        await bench.computed(ledger)
    bench.clock.now_s += DAY_S
    bench.report(ledger, shop=12)
    with pytest.raises(StoreError):
        ledger.flush()
    monkeypatch.setattr(SqliteStore, "write", write)
    assert await bench.computed(ledger) == {"shop": 12}
    assert await bench.computed(ledger, until_s=START_S) == {"shop": 10}


async def test_closing_writes_the_last_totals(bench: Bench) -> None:
    ledger = bench.ledger()
    bench.report(ledger, shop=10)
    await ledger.aclose()
    assert await bench.computed(bench.ledger()) == {"shop": 10}


async def test_a_gateway_writes_by_itself(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "FLUSH_S", 0.01)
    ledger = bench.ledger()
    written = asyncio.Event()
    flush, loop = ledger.flush, asyncio.get_running_loop()

    def flushed() -> None:
        flush()
        loop.call_soon_threadsafe(written.set)

    monkeypatch.setattr(ledger, "flush", flushed)
    bench.report(ledger, shop=10)
    ledger.start()
    async with asyncio.timeout(30):
        await written.wait()
    assert await bench.computed(bench.ledger()) == {"shop": 10}


async def test_expired_days_go(bench: Bench) -> None:
    ledger = bench.ledger(ttl_s=2 * DAY_S)
    bench.report(ledger, shop=10)
    ledger.flush()
    bench.clock.now_s += 3 * DAY_S
    assert await bench.computed(ledger) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica_id": "d", "model": "m", "since_s": 0.0},
        {"replica_id": "", "model": "m", "since_s": 0.0, "tenants": {}},
        {"replica_id": "d", "model": "m", "since_s": 0.0, "tenants": {"t": {"requests": -1}}},
        {"replica_id": "d", "model": "m", "since_s": 0.0, "tenants": {"t": {"engine_s": 1e300}}},
        {
            **{"replica_id": "d", "model": "m", "since_s": 0.0},
            "tenants": {f"t{n}": {} for n in range(1000)},
        },
    ],
)
async def test_a_report_that_makes_no_sense_is_left_out(
    bench: Bench, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    ledger = bench.ledger()
    ledger.take(wrong)
    ledger.take(wrong)
    assert await bench.computed(ledger) == {}
    assert caplog.text.count("a replica's usage is left out") == 1


async def test_a_damaged_record_is_left_out(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = bench.ledger()
    bench.report(ledger, "d1", shop=10)
    bench.report(ledger, "d2", shop=5)
    ledger.flush()
    read = SqliteStore.read

    def damaged(self: RecordStore, *args: Any) -> dict[str, bytes]:
        found = read(self, *args)  # type: ignore[arg-type]
        return {name: data if n else data[:-3] for n, (name, data) in enumerate(found.items())}

    monkeypatch.setattr(SqliteStore, "read", damaged)
    assert list((await bench.computed(ledger)).values()) in ([5], [10])
    assert "is damaged" in caplog.text


def test_a_record_survives_its_bytes() -> None:
    day = ReplicaDay("d", "m", {"shop": {"requests": 1}}, {3: {"shop": {"requests": 4}}})
    assert decode(encode(day)) == day
    [(hour, tenant, used)] = day.growth()
    assert (hour, tenant, used.requests) == (3, "shop", 3)


Folder = Callable[[], Path]


async def test_the_ledger_lies_beside_conversation_state(tmp_path: Path) -> None:
    default, own = tmp_path / "default", tmp_path / "own"
    for settings, place in (({}, default), ({"folder": str(own)}, own)):
        setup = StateSetup(ConversationSettings(**settings))
        made = make_ledger(setup, UsageSettings(), lambda: default)
        assert made is not None
        await made.sums(0, 1)
        assert (place / FILE).exists()
        await made.aclose()
    off = UsageSettings(enabled=False)
    assert make_ledger(StateSetup(ConversationSettings()), off, lambda: default) is None
