"""Tables of an app's recent requests, from `GET /headrace/v1/requests`.

A table has as many columns as the width allows, the most useful ones first: an id is never cut,
because it is what `headrace explain` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from headrace.cli.console import human_time
from headrace.cli.show.fitting import fitting

PATH = "/headrace/v1/requests"
Request = Mapping[str, Any]


class Column(NamedTuple):
    """A column of a table of requests."""

    name: str
    cell: Callable[[Request], str]
    priority: int
    """Columns with a low number are kept where the width is short."""
    is_text: bool = False


def age(now: float) -> Column:
    """Return the column of the seconds since each request came."""
    return Column("age", lambda one: _short(max(0.0, now - one["at"])), 1)


def _short(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _seconds(name: str) -> Callable[[Request], str]:
    return lambda one: "" if one.get(name) is None else human_time(one[name])


def state_of(request: Request) -> str:
    """Return a finished request's HTTP status, or the stage of one in flight."""
    if "status" in request:
        return str(request["status"])
    return "waits" if request["ttft_s"] is None else "answers"


def error_of(request: Request) -> str:
    """Return the reason why a request was not answered, or an empty text."""
    left = "client left" if request.get("status") == 499 else ""
    return request.get("error") or left


ID = Column("id", lambda one: one["id"], 0, is_text=True)
STATUS = Column("status", state_of, 2, is_text=True)
TTFT = Column("TTFT", _seconds("ttft_s"), 3)
TOTAL = Column("total", lambda one: _seconds("total_s" if "status" in one else "age_s")(one), 4)
TOKENS = Column("tokens", lambda one: "" if one["tokens"] is None else f"{one['tokens']:,}", 5)
ERROR = Column("error", error_of, 6, is_text=True)
ROUTE = Column("path", lambda one: one["path"].removeprefix("/v1/"), 7, is_text=True)
MODEL = Column("model", lambda one: str(one.get("model") or ""), 7, is_text=True)
REPLICA = Column("replica", lambda one: str(one["replica"] or "")[:8], 8, is_text=True)


def request_table(requests: Sequence[Request], now: float, width: int, title: str = "") -> Table:
    """Return one row per request, with the columns that fit `width` characters.

    Args:
        now: the gateway's time, in seconds since the epoch.
    """
    errors = [ERROR] if any(map(error_of, requests)) else []
    models = [MODEL] if len({one.get("model") or "" for one in requests} - {""}) > 1 else []
    columns = [ID, age(now), *models, ROUTE, STATUS, *errors, TTFT, TOTAL, TOKENS, REPLICA]
    cells = {column: [column.cell(one) for one in requests] for column in columns}
    by_priority = sorted(columns, key=lambda each: each.priority)
    kept = fitting({each: (each.name, *cells[each]) for each in by_priority}, width)
    kept = [column for column in columns if column in kept or column is ID]
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in kept:
        fold = {"overflow": "fold"} if column is ID else {"no_wrap": True}
        justify = "left" if column.is_text else "right"
        table.add_column(column.name, justify=justify, **fold)  # type: ignore[arg-type]
    for row in zip(*(cells[column] for column in kept), strict=True):
        table.add_row(*map(Text, row))
    return table
