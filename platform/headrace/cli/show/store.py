"""`headrace store`: pins and blocks of a running app's store, through its admin API."""

from __future__ import annotations

import json
from typing import Any

from headrace.cli import client
from headrace.cli.console import CliError, human_bytes, stderr, stdout

PATH = "/headrace/v1/store"
TIMEOUT_S = 60.0


def pins(name: str | None, *, as_json: bool) -> None:
    """Print the pinned prompts of each machine."""
    instance = client.running_instance(name)
    machines = client.call(instance, "GET", PATH, None, {}, TIMEOUT_S)["machines"]
    if as_json:
        print(json.dumps(machines, indent=2))
        return
    for each in machines:
        if "error" in each:
            continue
        taken, limit = human_bytes(each["bytes"]), human_bytes(each["limit_bytes"])
        _print(f"{each['machine'][:8]}: {each['chains']:,} pinned prompts, {taken} of {limit}")
        for pin in each["pins"]:
            _print(
                f"  {pin['hash']}  {pin['blocks']:,} blocks, {pin['hits']:,} uses, the last "
                f"{pin['used_s']:,.0f} s ago, namespace {pin['namespace']}"
            )
    _warn(machines)


def order(action: str, namespace: str | None, hash: str | None, name: str | None) -> None:
    """Carry out `unpin`, `clear` or `lookup` on every machine, and print the results."""
    wanted = {"action": action, "namespace": namespace, "hash": hash}
    instance = client.running_instance(name)
    machines = client.call(instance, "POST", PATH, wanted, {}, TIMEOUT_S)["machines"]
    for each in machines:
        if "error" not in each:
            _print(f"{each['machine'][:8]}: {_said(action, each)}")
    _warn(machines)


def _print(line: str) -> None:
    stdout().print(line, markup=False, highlight=False, soft_wrap=True)


def _said(action: str, answer: dict[str, Any]) -> str:
    if action == "unpin":
        return f"{answer['unpinned']:,} blocks are unpinned"
    if action == "clear":
        return f"{answer['dram']:,} blocks are removed from DRAM, {answer['nvme']:,} from the disk"
    found = answer["tiers"].items()
    return "; ".join(f"{digest}: {', '.join(tiers)}" for digest, tiers in found) or "not here"


def _warn(machines: list[dict[str, Any]]) -> None:
    if not machines:
        raise CliError("the app has no store")
    for each in machines:
        if "error" in each:
            stderr().print(f"{each['machine'][:8]}: {each['error']}", markup=False)
