"""`headrace usage`: a table, CSV and JSON of what requests cost."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from rich.console import Console

from headrace.cli.console import CliError
from headrace.cli.main import usage as command
from headrace.cli.show import usage
from headrace.cli.state import Instance

ROW = {"tenant": "shop", "model": "m", **dict.fromkeys(usage.COLUMNS, 0)}
ROWS: list[dict[str, Any]] = [
    {**ROW, "requests": 12, "prompt_tokens": 34_567, "pulled_tokens": 5, "engine_s": 1.26},
    {**ROW, "tenant": "", "requests": 1},
]
DOCUMENT = {"since": "2026-11-01T00:00:00Z", "until": "2026-11-02T00:00:00Z", "usage": ROWS}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the endpoint was asked for; it answers with `DOCUMENT`."""
    queries: list[Any] = []

    def call(instance: Any, method: str, path: str, **options: Any) -> Any:
        queries.append((path, options["query"]))
        return DOCUMENT

    monkeypatch.setattr(usage, "running_instance", lambda name: Instance("a", ""))
    monkeypatch.setattr(usage, "call", call)
    return queries


def test_a_table_has_the_columns_that_say_something() -> None:
    out = io.StringIO()
    table, left_out = usage.usage_table(ROWS, 200)
    Console(file=out, width=200).print(table)
    assert not left_out
    header, shop, none = [line.split() for line in out.getvalue().splitlines()]
    assert header[:4] == ["tenant", "model", "requests", "prompt"] and "pulled" in header
    assert "cached" not in header and "drafted" not in header
    assert shop[:4] == ["shop", "m", "12", "34,567"] and shop[-1] == "1.3"
    assert none[0] == usage.NO_TENANT


def test_a_narrow_terminal_gets_whole_names_and_what_fits_beside_them() -> None:
    row = {**ROW, "model": "smollm2-135m-instruct"}
    rows = [{**row, **dict.fromkeys(usage.COLUMNS, 34_567)}]
    out = io.StringIO()
    table, left_out = usage.usage_table(rows, 80)
    Console(file=out, width=80).print(table)
    header, line = out.getvalue().splitlines()
    assert line.split()[:2] == ["shop", "smollm2-135m-instruct"]
    assert header.split()[2:] == ["requests", "prompt", "output", "computed", "engine", "s"]
    assert left_out == [
        *("decode", "cached", "DRAM", "NVMe", "remote", "pulled", "blended"),
        *("drafted", "accepted"),
    ]


def test_csv_has_the_names_of_the_rest_document(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command(tenant="shop", model=None, since="7d", until=None, as_csv=True, name=None)
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["tenant"] for row in rows] == ["shop", ""]
    assert rows[0]["prompt_tokens"] == "34567" and rows[0]["engine_s"] == "1.26"
    assert asked == [(usage.PATH, {"tenant": "shop", "since": "7d"})]


def test_json_is_the_document(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    usage.usage(None, {"since": "24h"}, as_csv=False, as_json=True)
    assert json.loads(capsys.readouterr().out) == DOCUMENT


def test_csv_and_json_exclude_each_other(asked: list[Any]) -> None:
    with pytest.raises(CliError, match="exclude each other"):
        command(since="24h", as_csv=True, as_json=True)


def test_no_usage_is_said(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(DOCUMENT, "usage", [])
    usage.usage(None, {}, as_csv=False, as_json=False)
    assert "no usage from 2026-11-01" in capsys.readouterr().out
