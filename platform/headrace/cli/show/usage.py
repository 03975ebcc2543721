"""`headrace usage`: what requests cost, by tenant and model, from `GET /headrace/v1/usage`."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from headrace.cli.client import call, running_instance
from headrace.cli.console import stdout
from headrace.cli.show.fitting import fitting

PATH = "/headrace/v1/usage"
QUERY_S = 40.0
"""Time limit of the request: many days take a while to add up."""
NO_TENANT = "-"
"""Shown for requests of no tenant: those of an app without keys, and the app's own."""
COLUMNS = {
    "requests": "requests",
    "prompt_tokens": "prompt",
    "output_tokens": "output",
    "computed_tokens": "computed",
    "decode_tokens": "decode",
    "cached_tokens": "cached",
    "dram_tokens": "DRAM",
    "nvme_tokens": "NVMe",
    "remote_tokens": "remote",
    "pulled_tokens": "pulled",
    "blended_tokens": "blended",
    "drafted_tokens": "drafted",
    "accepted_tokens": "accepted",
    "engine_s": "engine s",
}
"""Header of each quantity's column; all but `requests` and `engine_s` are tokens."""
ALWAYS = ("requests", "prompt_tokens", "output_tokens", "computed_tokens", "engine_s")
"""Columns that are shown even if all are zero."""


def usage(
    name: str | None, wanted: Mapping[str, str | None], *, as_csv: bool, as_json: bool
) -> None:
    """Print the usage.

    Args:
        name: the instance's name; None for the only one.
        wanted: `since`, `until`, `tenant` and `model`; None for the default.

    Raises:
        CliError: the endpoint cannot be reached or refuses.
    """
    query = {field: value for field, value in wanted.items() if value is not None}
    document = call(running_instance(name), "GET", PATH, query=query, timeout_s=QUERY_S)
    if as_json:
        print(json.dumps(document, indent=2))
    elif as_csv:
        write_csv(document["usage"])
    elif not document["usage"]:
        stdout().print(f"no usage from {document['since']} to {document['until']}", markup=False)
    else:
        stdout().print(f"{document['since']} to {document['until']}; tokens", markup=False)
        table, left_out = usage_table(document["usage"], stdout().width)
        stdout().print(table)
        if left_out:
            names = ", ".join(left_out)
            stdout().print(f"too wide for this terminal: {names}; --csv has all", markup=False)


def usage_table(rows: Sequence[Mapping[str, Any]], width: int) -> tuple[Table, list[str]]:
    """Return a table with a row for each tenant and model, and the columns that say something, as
    far as they fit `width` characters; and the headers of those that do not fit."""
    names = {
        "tenant": [row["tenant"] or NO_TENANT for row in rows],
        "model": [row["model"] for row in rows],
    }
    said = [column for column in COLUMNS if any(row.get(column) for row in rows)]
    cells = {column: [_cell(row, column) for row in rows] for column in {*ALWAYS, *said}}
    texts = {header: (header, *of_rows) for header, of_rows in names.items()}
    for column in dict.fromkeys((*ALWAYS, *said)):
        texts[column] = COLUMNS[column], *cells[column]
    kept = fitting(texts, width)
    shown = [column for column in COLUMNS if column in kept]
    table = Table(box=None, pad_edge=False)
    for header in names:
        table.add_column(header, overflow="fold")
    for column in shown:
        table.add_column(COLUMNS[column], justify="right", no_wrap=True)
    columns = [*names.values(), *(cells[column] for column in shown)]
    for row in zip(*columns, strict=True):
        table.add_row(*map(Text, row))
    return table, [COLUMNS[column] for column in COLUMNS if column in cells and column not in kept]


def _cell(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column, 0)
    return f"{value:,.1f}" if column == "engine_s" else f"{value:,.0f}"


def write_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Write CSV with a header to stdout, with the quantities' names in the REST document."""
    writer = csv.DictWriter(sys.stdout, ["tenant", "model", *COLUMNS], extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
