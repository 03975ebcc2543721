"""`headrace store` and the admin API, against a gateway that is real down to the store's keeper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.cli.main import main
from tests.unit.gateway_fakes import FakeCluster
from tests.unit.test_cli_corpus import Cluster, Endpoint

PIN = {"namespace": "ab" * 16, "hash": "cd" * 32, "blocks": 3, "hits": 7, "stored_s": 5.0}
PINS = {"pins": [{**PIN, "used_s": 2.0}], "chains": 1, "bytes": 3 << 20, "limit_bytes": 1 << 30}


class Stores(Cluster):
    """Two machines; one of them does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[tuple[str, str | None, str | None]] = []

    async def store(
        self, action: str, namespace: str | None = None, hash: str | None = None
    ) -> list[dict[str, Any]]:
        self.orders.append((action, namespace, hash))
        answers: dict[str, dict[str, Any]] = {
            "pins": PINS,
            "unpin": {"unpinned": 3},
            "clear": {"dram": 4, "nvme": 5},
            "lookup": {"tiers": {"ab" * 16: ["dram", "nvme"]}},
        }
        silent = {"machine": "b" * 56, "error": "the store node does not answer"}
        return [{"machine": "a" * 56, **answers[action]}, silent]


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    endpoint, cluster = Endpoint(monkeypatch), Stores()
    endpoint.serve(cluster)
    yield cluster
    endpoint.close()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["store", *arguments])
    out, err = capsys.readouterr()
    code = caught.value.code
    return (code if isinstance(code, int) else 0 if code is None else 1), out, err


def test_pins_are_listed_with_what_they_take(
    stores: Stores, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "pins")
    assert code == 0 and "cd" * 32 in out and "aaaaaaaa: 1 pinned prompts, " in out
    assert "bbbbbbbb: the store node does not answer" in err
    code, out, _ = run(capsys, "pins", "--json")
    assert code == 0 and '"limit_bytes": 1073741824' in out


@pytest.mark.parametrize(
    ("arguments", "order", "said"),
    [
        (["unpin"], ("unpin", None, None), "3 blocks are unpinned"),
        (["unpin", "cd" * 32], ("unpin", None, "cd" * 32), "3 blocks are unpinned"),
        (
            ["clear", "--yes", "--namespace", "ab" * 16],
            ("clear", "ab" * 16, None),
            "4 blocks are removed from DRAM, 5 from the disk",
        ),
        (["lookup", "cd"], ("lookup", None, "cd"), f"{'ab' * 16}: dram, nvme"),
    ],
)
def test_an_order_reaches_every_machine(
    stores: Stores,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    order: tuple[str, str | None, str | None],
    said: str,
) -> None:
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and said in out and stores.orders == [order]


def test_what_is_wrong_is_said_and_nothing_is_done(
    stores: Stores, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "lookup", "xyz")
    assert code and "hash" in err
    code, _, err = run(capsys, "clear", "--yes", "--namespace", "ab")
    assert code and "namespace" in err
    assert stores.orders == []


def test_an_app_without_a_store_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = Endpoint(monkeypatch)
    code, _, err = run(capsys, "pins")
    assert code and "no store" in err and isinstance(endpoint.cluster, FakeCluster)
    endpoint.close()
