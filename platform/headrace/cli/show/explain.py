"""`headrace explain`: prints why a request was served as it was, from its plan
(`GET /headrace/v1/plans/{request_id}`), or lists the recent requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from headrace.cli import client
from headrace.cli.console import CliError, human_time, stdout
from headrace.cli.show.requests import PATH, request_table
from headrace.cli.state import Instance

MAX_LISTED = 20
MAX_TRIED = 50
"""Number of the newest requests among which `--last` looks for one with a plan."""
SOURCES = {
    "hbm": "in the engine's own cache",
    "dram": "loaded from DRAM",
    "nvme": "loaded from disk",
    "remote": "loaded from another machine",
    "object": "loaded from the object store",
    "compute": "computed",
}
PARTS = {
    "call": "call the prefill replica",
    "queue": "wait for the engine",
    "pull": "bring cached KV into DRAM",
    "compute": "compute the prompt",
    "load": "load cached KV",
    "transfer": "move the KV",
    "handoff": "hand over to the decode replica",
    "decode_queue": "wait for the decode engine",
    "decode": "first decode step",
}
OTHERS = {"stall": "delay of running answers", "behind": "delay of later prompts"}


def explain(request_id: str | None, name: str | None, *, last: bool, as_json: bool) -> None:
    """Print a request's plan; without an id, the recent requests, or the newest one's plan.

    Args:
        last: explain the newest request that has a plan.

    Raises:
        CliError: no instance runs, or none of its replicas remembers the request.
    """
    if request_id is not None and last:
        raise CliError("name a request or use --last, not both", 2)
    instance = client.running_instance(name)
    if request_id is None and not last:
        recent = client.get_json(instance, PATH)
        if as_json:
            print(json.dumps(recent, indent=2))
        else:
            render_list(recent, stdout())
        return
    plan = _newest(instance) if request_id is None else _plan(instance, request_id)
    if plan is None:
        raise CliError(
            f"no replica has a plan of {request_id}: it keeps its last 1,000 until it stops; "
            "headrace explain lists recent requests"
            if request_id
            else "none of the recent requests has a plan; headrace explain lists them"
        )
    if as_json:
        print(json.dumps(plan, indent=2))
    else:
        render(plan, stdout())


def _plan(instance: Instance, request_id: str) -> Any:
    return client.find_json(instance, f"/headrace/v1/plans/{quote(request_id, safe='')}")


def _newest(instance: Instance) -> Any:
    """Return the plan of the newest request that has one."""
    recent = client.get_json(instance, PATH)
    requests = [*recent["in_flight"], *recent["finished"]]
    requests.sort(key=lambda one: one["at"], reverse=True)
    plans = (_plan(instance, one["id"]) for one in requests[:MAX_TRIED])
    return next(filter(None, plans), None)


def render_list(recent: Mapping[str, Any], out: Console) -> None:
    """Print the requests in flight and the last finished ones."""
    requests = [*recent["in_flight"][::-1], *recent["finished"]][:MAX_LISTED]
    if not requests:
        out.print("no request since the gateway started")
        return
    out.print(request_table(requests, recent["now"], out.width), soft_wrap=False)
    out.print("headrace explain ID says why a request went where; --last takes the newest one")


def render(plan: Mapping[str, Any], out: Console) -> None:
    """Print a plan: the reason, the prompt, the predicted times, and the measured ones."""

    def say(text: str) -> None:
        out.print(text, markup=False, highlight=False, soft_wrap=False)

    say(reason(plan))
    say(f"request {plan['request_id']}, planned by the {_planner(plan)}")
    runs = ", ".join(
        f"{r['tokens']:,} {SOURCES.get(r['source'], r['source'])}" for r in plan["runs"]
    )
    say(f"prompt: {plan['prompt_tokens']:,} tokens: {runs}")
    out.print()
    out.print(price_table(plan), soft_wrap=False)
    out.print()
    for line in _results(plan):
        say(line)
    if plan["broken"]:
        say(f"no choice keeps every target: this one {' and '.join(plan['broken'])}")


def _planner(plan: Mapping[str, Any]) -> str:
    return "gateway" if plan["made_by"] == "gateway" else "decode replica"


def reason(plan: Mapping[str, Any]) -> str:
    """Return the sentence that says who answered the request, and why."""
    by = ""
    if plan["prefill"]:
        by = f"prefilled by {plan['replica'] or plan['prefill']} and "
    answered = f"{by}answered by {plan['decode'] or 'the decode replica'}"
    return f"{answered[0].upper()}{answered[1:]}, because {_why(plan)}"


def _why(plan: Mapping[str, Any]) -> str:
    why = str(plan["reasons"][0]) if plan["reasons"] else "it is the only choice"
    if saved := re.fullmatch(r"(local|remote) saves ([\d.]+) s", why):
        kind, seconds = saved[1], float(saved[2])
        other = {"local": "a remote prefill", "remote": "a prefill on the decode replica"}[kind]
        return f"that is predicted to cost {human_time(seconds)} less than {other}"
    return why


def predicted_ttft_s(plan: Mapping[str, Any]) -> float:
    """Return the predicted seconds to the first token of a plan's choice."""
    return _ttft(plan["predicted"], plan["kind"])


def _ttft(predicted: Mapping[str, float], kind: str) -> float:
    """Return the predicted seconds to the first token: the total without the others' delays."""
    rest = sum(predicted.get(f"{kind}.{part}", 0.0) for part in OTHERS)
    return predicted.get(f"{kind}.total", 0.0) - rest


def price_table(plan: Mapping[str, Any]) -> Table:
    """Return the predicted times of the best local and the best remote choice, and the measured
    ones; parts that are zero for both are left out."""
    predicted: Mapping[str, float] = plan["predicted"]
    measured = plan.get("measured") or {}
    kinds = [kind for kind in ("local", "remote") if f"{kind}.total" in predicted]
    table = Table(
        title="predicted, for a prefill on the decode replica and a remote one",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for kind in kinds:
        chosen = ", chosen" if kind == plan["kind"] else ""
        table.add_column(f"{kind} prefill{chosen}", justify="right")
    if measured:
        table.add_column("measured", justify="right")

    def row(label: str, values: list[float], came: float | None = None, style: str = "") -> None:
        cells = [human_time(value) if value else "-" for value in values]
        extra = [""] if measured else []
        if measured and came is not None:
            extra = [human_time(came)]
        table.add_row(label, *cells, *extra, style=style)

    def parts(names: Mapping[str, str]) -> None:
        for part, label in names.items():
            values = [predicted.get(f"{kind}.{part}", 0.0) for kind in kinds]
            if any(round(value, 5) for value in values):
                row(label, values)

    parts(PARTS)
    firsts = [_ttft(predicted, kind) for kind in kinds]
    row("time to first token", firsts, measured.get("ttft_s"), "bold")
    parts(OTHERS)
    totals = [predicted.get(f"{kind}.total", 0.0) for kind in kinds]
    row("total cost", totals, style="bold")
    return table


def _results(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the comparison of the measurements with the predictions."""
    measured = plan.get("measured")
    if not measured:
        yield "not measured yet: the first token has not come"
        return
    predicted_s = predicted_ttft_s(plan)
    yield (
        f"first token after {human_time(measured['ttft_s'])}, predicted {human_time(predicted_s)}"
    )
    yield (
        f"cache: {measured['cached_tokens']:,.0f} prompt tokens reused; "
        f"{plan['reachable_tokens']:,} were cached somewhere"
    )
