"""Prints how an engine keeps within its memory budget for KV: for `kv-budget`, `up` and `model
check-kv`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from headrace.cli import client
from headrace.cli.console import CliError, human_bytes, stdout

if TYPE_CHECKING:
    from headrace.model.kv_budget import KvBudgetPlan


def kv_budget(name: str | None, *, as_json: bool) -> None:
    """Print how a running instance's engines keep within `techniques.kv_budget`.

    Raises:
        CliError: no instance runs, or it has no budget.
    """
    plan = client.running_instance(name).kv_plan
    if plan is None:
        raise CliError(
            "this instance has no budget for KV; set techniques.kv_budget, or try one with "
            "headrace model check-kv MODEL --kv-budget GIB"
        )
    if as_json:
        print(json.dumps(plan, indent=2))
    else:
        render(plan, stdout())


def to_plain_data(plan: KvBudgetPlan) -> dict[str, Any]:
    """Return a plan as plain data. Raises ModelError if no option keeps to the budget."""
    options = [asdict(option) | {"sizes": option.sizes._asdict()} for option in plan.options]
    return {"request": asdict(plan.request), "options": options, "chosen": plan.chosen.name}


def summary(plan: dict[str, Any]) -> str:
    """Describe the chosen option in a line."""
    option = next(option for option in plan["options"] if option["name"] == plan["chosen"])
    if option["name"] == "full":
        return "all KV is kept; answers are exact"
    offloaded = option["name"] == "offloaded"
    what = "is attended to; all is kept" if offloaded else "is kept of long prompts"
    return f"{option['name']}: {option['keep_ratio']:.0%} {what}; expected KL {_kl(option)} a token"


def render(plan: dict[str, Any], out: Console) -> None:
    """Print each option, and the chosen one."""
    request = plan["request"]
    out.print(
        f"{human_bytes(request['budget_bytes'])} for KV, and {human_bytes(request['host_bytes'])} "
        f"of host memory, for {request['contexts']} contexts of {request['context_tokens']} "
        f"tokens, {request['answer_tokens']} of them the answer{_reading(request['read_bytes'])}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for column in ("option", "keep ratio", "KL", "cache", "a step reads", "beside it", "host"):
        table.add_column(column, justify="left" if column == "option" else "right")
    for option in plan["options"]:
        if option["kl"] is None:
            continue
        sizes = [human_bytes(size) for size in option["sizes"].values()]
        table.add_row(option["name"], f"{option['keep_ratio']:.0%}", _kl(option), *sizes)
    out.print(table)
    for option in plan["options"]:
        chosen = "chosen, the least error that fits" if option["name"] == plan["chosen"] else ""
        if why := option["why_not"] or chosen:
            out.print(f"{option['name']}: {why}", markup=False, highlight=False, soft_wrap=True)


def _reading(read_bytes: int | None) -> str:
    return "" if read_bytes is None else f"; a step may read {human_bytes(read_bytes)} of KV"


def _kl(option: dict[str, Any]) -> str:
    return "" if option["kl"] is None else f"{option['kl']:.2g}"
