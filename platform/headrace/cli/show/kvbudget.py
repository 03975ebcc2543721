"""Prints how an engine keeps within a budget of KV: for `explain`, `up` and `model check-kv`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from headrace.cli.console import human_bytes

if TYPE_CHECKING:
    from headrace.model.kvbudget import Plan


def told(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data. Raises ModelError if no way keeps to the budget."""
    ways = [asdict(way) | {"sizes": way.sizes._asdict()} for way in plan.ways]
    return {"asked": asdict(plan.asked), "ways": ways, "chosen": plan.chosen.name}


def summary(plan: dict[str, Any]) -> str:
    """Describe the chosen way in a line."""
    way = next(way for way in plan["ways"] if way["name"] == plan["chosen"])
    if way["name"] == "all":
        return "all KV is kept; answers are exact"
    offloaded = way["name"] == "offloaded"
    what = "is attended to; all is kept" if offloaded else "is kept of long prompts"
    return f"{way['name']}: {way['share']:.0%} {what}; expected KL {_kl(way)} a token"


def render(plan: dict[str, Any], out: Console) -> None:
    """Print each way, and the chosen one."""
    asked = plan["asked"]
    out.print(
        f"{human_bytes(asked['budget_bytes'])} for KV, and {human_bytes(asked['host_bytes'])} of "
        f"host memory, for {asked['contexts']} contexts of {asked['context_tokens']} tokens, "
        f"{asked['answer_tokens']} of them the answer{_reading(asked['read_bytes'])}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    for column in ("way", "share", "KL", "cache", "a step reads", "beside it", "host"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way in plan["ways"]:
        if way["kl"] is None:
            continue
        sizes = [human_bytes(size) for size in way["sizes"].values()]
        table.add_row(way["name"], f"{way['share']:.0%}", _kl(way), *sizes)
    out.print(table)
    for way in plan["ways"]:
        chosen = "chosen, the least error that fits" if way["name"] == plan["chosen"] else ""
        if why := way["why_not"] or chosen:
            out.print(f"{way['name']}: {why}", markup=False, highlight=False, soft_wrap=True)


def _reading(read_bytes: int | None) -> str:
    return "" if read_bytes is None else f"; a step may read {human_bytes(read_bytes)} of KV"


def _kl(way: dict[str, Any]) -> str:
    return "" if way["kl"] is None else f"{way['kl']:.2g}"
