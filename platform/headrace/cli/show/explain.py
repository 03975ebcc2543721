"""`headrace explain`: prints the plan of one request, `GET /headrace/v1/plans/{request_id}`, or the
plan by which the app's engines keep within their budget of KV."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.table import Table

from headrace.cli import client
from headrace.cli.console import CliError, stdout
from headrace.cli.show import kv_budget


def explain(request_id: str | None, name: str | None, *, as_json: bool) -> None:
    """Print a plan. Raises CliError if no instance runs, or none remembers the request.

    Args:
        request_id: None for the plan of `techniques.kv_budget`.
    """
    instance = client.running_instance(name)
    if request_id is None:
        if instance.kv_plan is None:
            raise CliError(
                "name a request, by the x-request-id of its answer: without one this explains "
                "techniques.kv_budget, which is not set"
            )
        if as_json:
            print(json.dumps(instance.kv_plan, indent=2))
        else:
            kv_budget.render(instance.kv_plan, stdout())
        return
    plan = client.get_json(instance, f"/headrace/v1/plans/{quote(request_id, safe='')}")
    if as_json:
        print(json.dumps(plan, indent=2))
    else:
        render(plan, stdout())


def render(plan: dict[str, Any], out: Console) -> None:
    """Print a plan: the choice, the sources of the KV, and the arithmetic."""

    def say(text: str) -> None:
        out.print(text, markup=False, highlight=False, soft_wrap=True)

    where = f"prefilled by {plan['replica'] or plan['prefill']}, " if plan["prefill"] else ""
    say(f"{plan['request_id']}: {plan['kind']}: {where}answered by {plan['decode']}")
    runs = ", ".join(f"{run['tokens']} {run['source']}" for run in plan["runs"])
    say(f"prompt: {plan['prompt_tokens']} tokens: {runs}")
    out.print(price_table(plan["predicted"]))
    say(f"planned by a {plan['made_by']}, because {plan['reasons'][0]}")
    measured = plan.get("measured")
    if measured:
        say(
            f"measured: first token after {measured['ttft_s']:.3f} s, "
            f"{measured['cached_tokens']:.0f} prompt tokens not computed "
            f"of {plan['reachable_tokens']} that were held somewhere"
        )
        say(
            f"in hindsight it cost {measured['cost_s']:.3f} s; "
            f"regret: {measured['regret_s']:.3f} s over what the next best was predicted to cost"
        )
    for other in plan["runners_up"]:
        by = f"prefilled by {other['prefill']}" if other["prefill"] else "prefilled there"
        say(f"next: {other['total_s']:.3f} s on {other['decode']}, {by}")
    if plan["broken"]:
        say(f"no choice keeps every target: this {' and '.join(plan['broken'])}")


def price_table(predicted: dict[str, float]) -> Table:
    """Return a row per part of the price: seconds of the best local and best remote choice."""
    table = Table(title="predicted seconds", title_justify="left")
    table.add_column("part")
    parts = list(dict.fromkeys(part.partition(".")[2] for part in predicted))
    parts.sort(key=lambda part: part == "total")
    for kind in ("local", "remote"):
        table.add_column(kind, justify="right")
    for part in parts:
        seconds = (predicted.get(f"{kind}.{part}") for kind in ("local", "remote"))
        table.add_row(part.replace("_", " "), *("" if s is None else f"{s:.4f}" for s in seconds))
    return table
