"""The routes of usage: who sees what, which times may be asked for, one request's parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config.key_file import KeyEntry, KeyFile, hash_of, write_keys
from headrace.gateway.kept_records.sqlite_store import SqliteStore
from headrace.gateway.usage.ledger import UsageLedger
from headrace.gateway.usage.routes import USAGE, time_of
from headrace.gateway.usage.setup import FILE
from tests.unit.gateway_fakes import Bench, FakeCluster, answer, asked_from_elsewhere, gateway_over

NAMES = ("shop", "bank", "admin")
NOW_S = 1_800_000_000.0


def key_file(folder: Path) -> str:
    keys = [
        KeyEntry(
            name=name,
            hash=hash_of(name.encode()),
            tenant=name,
            role="admin" if name == "admin" else "user",
        )
        for name in NAMES
    ]
    write_keys(folder / "keys.yaml", KeyFile(keys=keys))
    return str(folder / "keys.yaml")


def ledger_in(folder: Path) -> UsageLedger:
    """With usage of two tenants in this hour."""
    ledger = UsageLedger(lambda: SqliteStore(folder, 1e9, 1 << 30, name=FILE))
    usage = {"requests": 1, "prompt_tokens": 9, "engine_s": 0.5}
    ledger.take(
        {
            "replica_id": "d",
            "model": "m",
            "since_s": 0.0,
            "tenants": {"shop": usage, "bank": {"requests": 2}},
        }
    )
    return ledger


async def asked(bench: Bench, path: str = "", key: str | None = "admin") -> tuple[int, Any]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with bench.client.get(USAGE + path, headers=headers) as response:
        return response.status, await response.json()


async def test_an_administrator_sees_all_tenants(tmp_path: Path) -> None:
    ledger, keys = ledger_in(tmp_path), key_file(tmp_path)
    async with gateway_over(answer, usage=ledger, api_keys_file=keys) as bench:
        status, document = await asked(bench)
        assert status == 200
        assert [row["tenant"] for row in document["usage"]] == ["bank", "shop"]
        shop = document["usage"][1]
        assert (shop["model"], shop["requests"], shop["prompt_tokens"]) == ("m", 1, 9)
        assert shop["engine_s"] == 0.5 and shop["pulled_tokens"] == 0
        _, one = await asked(bench, "?tenant=shop&model=m&since=1h")
        assert [row["tenant"] for row in one["usage"]] == ["shop"]


async def test_a_tenants_key_sees_its_own_usage_only(tmp_path: Path) -> None:
    ledger, keys = ledger_in(tmp_path), key_file(tmp_path)
    async with gateway_over(answer, usage=ledger, api_keys_file=keys) as bench:
        for query in ("", "?tenant=shop"):
            _, document = await asked(bench, query, "shop")
            assert [row["tenant"] for row in document["usage"]] == ["shop"]
        status, document = await asked(bench, "?tenant=bank", "shop")
        assert status == 403 and document["error"]["code"] == "other_tenant"
        assert (await asked(bench, key=None))[0] == 401


async def test_without_keys_only_this_machines_clients_see_it(tmp_path: Path) -> None:
    async with gateway_over(answer, usage=ledger_in(tmp_path)) as bench:
        assert (await asked(bench, key=None))[0] == 200
    for path in (USAGE, USAGE + "/request-1"):
        begun = await asked_from_elsewhere(FakeCluster(), "GET", path, b"")
        assert begun["status"] == 403


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("?since=yesterday", "since"),
        ("?until=2026-13-01", "until"),
        ("?since=1h&until=2h", "since"),
        ("?color=red", "query"),
        ("?since=1h&since=2h", "query"),
        ("?" + "since=1h&" * 50, "query"),
    ],
)
async def test_a_query_that_makes_no_sense_is_refused(
    tmp_path: Path, query: str, fault: str
) -> None:
    async with gateway_over(answer, usage=ledger_in(tmp_path)) as bench:
        status, document = await asked(bench, query, None)
        assert status == 400 and fault in document["error"]["message"]


async def test_without_a_ledger_the_answer_says_what_is_off(tmp_path: Path) -> None:
    async with gateway_over(answer) as bench:
        status, document = await asked(bench, key=None)
        assert status == 404 and "gateway.usage.enabled" in document["error"]["message"]


async def test_a_store_that_fails_is_answered_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise OSError("the disk is gone")

    async with gateway_over(answer, usage=ledger_in(tmp_path)) as bench:
        monkeypatch.setattr(UsageLedger, "_sums", fails)
        status, document = await asked(bench, key=None)
        assert status == 503 and "the disk is gone" in document["error"]["message"]


PARTS = [
    {
        **{"replica_id": "p", "model": "m", "tenant": "shop", "complete": True},
        "usage": {"computed_tokens": 100, "engine_s": 0.25},
    },
    {
        **{"replica_id": "d", "model": "m", "tenant": "shop", "complete": False},
        "usage": {"computed_tokens": 1, "pulled_tokens": 99, "engine_s": 0.5},
    },
]


async def test_a_requests_parts_are_added_up(tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    async with gateway_over(answer, api_keys_file=keys) as bench:
        bench.cluster.parts = PARTS
        status, document = await asked(bench, "/request-1", "shop")
        assert status == 200 and document["parts"] == PARTS and not document["complete"]
        usage = document["usage"]
        assert (usage["computed_tokens"], usage["pulled_tokens"]) == (101, 99)
        assert usage["engine_s"] == 0.75
        assert (await asked(bench, "/request-1"))[0] == 200
        status, document = await asked(bench, "/request-1", "bank")
        assert status == 404 and document["error"]["code"] == "usage_not_found"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24h", NOW_S - 86_400),
        ("7d", NOW_S - 7 * 86_400),
        ("90m", NOW_S - 5_400),
        ("2w", NOW_S - 14 * 86_400),
        ("1700000000", 1_700_000_000),
        ("2026-11-01", 1_793_491_200),
        ("2026-11-01T12:00", 1_793_534_400),
        ("2026-11-01T12:00+02:00", 1_793_527_200),
        ("2026-11-01T12:00:00Z", 1_793_534_400),
    ],
)
def test_times_are_understood(text: str, expected: float) -> None:
    assert time_of(text, NOW_S) == expected
