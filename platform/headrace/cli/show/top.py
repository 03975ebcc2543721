"""`headrace top`: rates, times, replicas and requests of the app, live in the terminal.

A screen has as many rows as the terminal, 24 are enough: replicas take a third of the room that the
totals leave, requests in flight and finished ones the rest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.cli import client
from headrace.cli.console import CliError, human_time, stdout
from headrace.cli.show import status
from headrace.cli.show.keyboard import Keyboard
from headrace.cli.show.requests import PATH, Request, request_table
from headrace.cli.state import Instance
from headrace.observability.health import unhealthy_replicas

BARS = "▁▂▃▄▅▆▇█"
TITLES = 6
"""Lines of the titles and headings of the three tables."""


@dataclass(frozen=True)
class Snapshot:
    """The app's documents at one moment; an app of another version may lack the last two."""

    status: dict[str, Any]
    history: dict[str, Any] | None
    requests: dict[str, Any] | None

    @classmethod
    def of(cls, instance: Instance) -> Snapshot:
        """Ask the app. Its status is at most a second old, however many readers there are.

        Raises:
            CliError: it does not answer.
        """
        found = client.get_json(instance, "/headrace/v1/console")
        history = client.find_json(instance, "/headrace/v1/history")
        return cls(found, history, client.find_json(instance, PATH))

    def document(self) -> dict[str, Any]:
        """Return the documents and the health, for `--json`."""
        return {"at": time.time(), "health": self.status.get("health"), **asdict(self)}


Order = tuple[str, Callable[[Request], float]]


def _lowest(name: str) -> Callable[[Request], float]:
    """Return a sort key that puts the highest values first, and unknown ones last."""
    return lambda one: -(one[name] if one.get(name) is not None else -1.0)


ORDERS: Sequence[Order] = (
    ("newest", lambda one: -one["at"]),
    ("slowest first token", _lowest("ttft_s")),
    ("most tokens", _lowest("tokens")),
)


def top(name: str | None, *, every_s: float, once: bool, as_json: bool) -> None:
    """Show the state until `q` or Ctrl-C; once, if asked or if the output is no terminal.

    An app that stops to answer is a line on the screen, and is asked again.

    Args:
        as_json: print a JSON document for each refresh, one a line.

    Raises:
        CliError: no instance runs, or it does not answer the first time.
    """
    instance = client.running_instance(name)
    out = stdout()
    snapshot = Snapshot.of(instance)
    try:
        if as_json:
            _print_documents(instance, snapshot, every_s, once)
        elif once or not out.is_terminal:
            for part in frame(snapshot, out.width, 10_000, ORDERS[0]):
                out.print(part, soft_wrap=False)
        else:
            _show(instance, snapshot, every_s)
    except KeyboardInterrupt:
        return


def _print_documents(instance: Instance, first: Snapshot, every_s: float, once: bool) -> None:
    print(json.dumps(first.document()), flush=True)
    while not once:
        time.sleep(every_s)
        print(json.dumps(Snapshot.of(instance).document()), flush=True)


def _show(instance: Instance, snapshot: Snapshot, every_s: float) -> None:
    """Redraw the screen after each refresh and each key."""
    problem, order, paused = "", 0, False
    asked_s = time.monotonic()
    out = stdout()
    with (
        Keyboard() as keyboard,
        Live(console=out, screen=True, auto_refresh=False, vertical_overflow="crop") as screen,
    ):
        while True:
            pause = "p continues (paused)" if paused else "p pauses"
            keys = f"{time.strftime('%H:%M:%S')}  q quits, s sorts ({ORDERS[order][0]}), {pause}"
            bar = Text(problem or keys, style="red" if problem else "dim", no_wrap=True)
            rows = frame(snapshot, out.width, out.height - 1, ORDERS[order])
            screen.update(Group(bar, *rows), refresh=True)
            key = keyboard.wait(max(0.0, every_s - (time.monotonic() - asked_s)))
            if key == "q":
                return
            if key == "s":
                order = (order + 1) % len(ORDERS)
            if key == "p":
                paused = not paused
            if key:
                continue
            asked_s = time.monotonic()
            if paused:
                continue
            try:
                snapshot, problem = Snapshot.of(instance), ""
            except CliError as error:
                problem = f"{time.strftime('%H:%M:%S')}: {error}"


def frame(snapshot: Snapshot, width: int, height: int, order: Order) -> Iterator[status.Part]:
    """Yield one screen of at most `height` lines: health, rates, times, replicas and requests."""
    totals = list(_totals(snapshot, width))
    left = max(3, height - len(totals) - TITLES)
    requests = snapshot.requests or {"now": 0.0, "in_flight": [], "finished": []}
    replicas = snapshot.status.get("replicas") or []
    shown = replicas[: max(1, left // 3)]
    left -= max(1, len(shown)) + (len(shown) < len(replicas))
    flying = sorted(requests["in_flight"], key=order[1])[: max(1, left // 2)]
    left -= max(1, len(flying))
    finished = sorted(requests["finished"], key=order[1])[: max(1, left)]
    yield from totals
    unhealthy = unhealthy_replicas(snapshot.status.get("gateway") or {})
    yield replica_rows(shown, unhealthy)
    if len(shown) < len(replicas):
        yield Text(f"... and {len(replicas) - len(shown)} more", style="dim")
    yield _requests("in flight", len(requests["in_flight"]), flying, requests["now"], width)
    yield _requests("finished", len(requests["finished"]), finished, requests["now"], width)


def replica_rows(replicas: Sequence[dict[str, Any]], unhealthy: dict[str, str]) -> Table:
    """Return the table of replicas, with a bar for the part of the KV cache that is in use."""
    table = Table(title="replicas", title_justify="left", box=None, pad_edge=False)
    table.add_column("replica", overflow="fold")
    for column in ("running", "waiting", "KV used"):
        table.add_column(column, justify="right")
    table.add_column("")
    for one in replicas:
        used = float(one.get("kv_usage") or 0.0)
        state = unhealthy.get(str(one.get("replica_id")), "")
        table.add_row(
            status.short_name(one),
            str(one.get("running", "?")),
            str(one.get("waiting", "?")),
            f"{used:.0%}",
            Text.assemble("#" * round(10 * used) + "." * (10 - round(10 * used)), f" {state}"),
        )
    return table


def _requests(
    title: str, count: int, rows: Sequence[Request], now: float, width: int
) -> status.Part:
    if not rows:
        return Text(f"no request {title}")
    more = f", {len(rows)} shown" if len(rows) < count else ""
    return request_table(rows, now, width, f"{title}: {count}{more}")


def _totals(snapshot: Snapshot, width: int) -> Iterator[Text]:
    """Yield the health, and the rates and times of the last minute."""
    health = status.health_line(snapshot.status, None)
    health.no_wrap, health.overflow = True, "ellipsis"
    yield health
    last = (snapshot.history or {}).get("last")
    if not last:
        yield Text("no history: the gateway has none of the last minute")
        return

    def timed(name: str) -> str:
        return "-" if last.get(name) is None else human_time(last[name])

    errors = "-" if last.get("error_rate") is None else f"{last['error_rate']:.1%}"
    yield Text(
        f"requests/s {last['requests_per_s']:.2f}   tokens/s {last['tokens_per_s']:.1f}   "
        f"errors {errors}"
    )
    yield Text(
        f"TTFT p50 {timed('ttft_p50_s')}, p99 {timed('ttft_p99_s')}   "
        f"TPOT p50 {timed('tpot_p50_s')}, p99 {timed('tpot_p99_s')}"
    )
    if bars := sparkline(snapshot.history or {}, width - 30):
        yield Text(f"requests, 10 s a column: {bars}", no_wrap=True)


def sparkline(history: Mapping[str, Any], width: int) -> str:
    """Return a bar for each of the last ten-second steps, of the requests that came in it."""
    series = next((one for one in history.get("series") or () if one["step_s"] == 10), None)
    counts = [] if series is None else series["requests"][-max(1, width) :]
    if not any(counts):
        return ""
    highest = max(counts)
    return "".join(BARS[round((len(BARS) - 1) * count / highest)] for count in counts)
