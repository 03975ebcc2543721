"""`headrace top`: shows the state of the app live in the terminal, like the web console."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.cli import client
from headrace.cli.console import CliError, human_bytes, human_seconds, stdout
from headrace.cli.show import status
from headrace.cli.state import Instance


def top(name: str | None, *, every_s: float, once: bool) -> None:
    """Show the state until interrupted; once, if asked or if the output is no terminal.

    An app that stops to answer is a line on the screen, and is asked again.

    Raises:
        CliError: no instance runs, it has no gateway, or it does not answer the first time.
    """
    instance = client.running_instance(name)
    if instance.token_path != "relay":
        raise CliError(f'token_path "{instance.token_path}" has no gateway to ask')
    out = stdout()
    state = _ask(instance)
    if once or not out.is_terminal:
        for part in frame(instance, state):
            out.print(part)
        return
    problem = ""
    with Live(console=out, screen=True, auto_refresh=False, vertical_overflow="crop") as screen:
        while True:
            now = time.strftime("%H:%M:%S")
            line = Text(problem or f"{now}, every {every_s:g} s; Ctrl-C ends")
            screen.update(Group(line, *frame(instance, state)), refresh=True)
            time.sleep(every_s)
            try:
                state, problem = _ask(instance), ""
            except CliError as error:
                problem = f"{now}: {error}"


def _ask(instance: Instance) -> dict[str, Any]:
    """Return the state, at most a second old. The gateway makes one for all readers."""
    found: dict[str, Any] = client.get_json(instance, "/headrace/v1/console")
    return found


def frame(instance: Instance, state: dict[str, Any]) -> Iterator[status.Part]:
    """Yield one screen: the instance, the oldest requests, then replicas, tiers and totals."""
    yield from status.head(instance)
    requests = state.get("gateway", {}).get("requests", [])
    if requests:
        yield request_table(requests)
    else:
        yield Text("no request in flight")
    yield from status.overview(instance, state)


def request_table(requests: list[dict[str, Any]]) -> Table:
    """Return one row per request in flight at the asked gateway, the oldest first, at most ten."""
    table = Table(title="oldest requests in flight (headrace explain ID)", title_justify="left")
    for column in ("id", "route", "replica"):
        table.add_column(column)
    for column in ("age", "first token after", "sent"):
        table.add_column(column, justify="right")
    for one in requests[:10]:
        ttft = "waits" if one["ttft_s"] is None else f"{one['ttft_s']:.2f} s"
        table.add_row(
            Text(one["id"]),
            Text(one["path"]),
            Text(one["replica"][:8]),
            human_seconds(one["age_s"]),
            ttft,
            human_bytes(one["sent_bytes"]),
        )
    return table
