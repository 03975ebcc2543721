"""`headrace status`: prints the app's health in a line, then `GET /headrace/v1/status` as tables
that fit 80 columns."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli import client, state
from headrace.cli.console import human_bytes, human_seconds, human_time, stdout
from headrace.observability.health import gateway_models, unhealthy_replicas

Part = Text | Table
"""A part of the output, for one `print`."""
STYLES = {"ok": "green", "degraded": "yellow", "failing": "red"}
"""Colour of each state of the app."""


def status(name: str | None, *, as_json: bool, verbose: bool) -> None:
    """Print the state of one instance. Raises CliError if none runs or it does not answer."""
    instance = client.running_instance(name)
    data, history = fetch(instance)
    if as_json:
        print(json.dumps(document(data, history), indent=2))
        return
    render(instance, data, stdout(), history=history, verbose=verbose)


def fetch(instance: state.Instance) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the status, and the history of the last hours.

    Raises:
        CliError: the app does not answer.
    """
    data = client.get_json(instance, "/headrace/v1/status")
    return data, client.find_json(instance, "/headrace/v1/history")


def document(data: dict[str, Any], history: dict[str, Any] | None) -> dict[str, Any]:
    """Return the status for `--json`: the app's own, and the last minute."""
    return {"health": None, "last_minute": (history or {}).get("last"), **data}


def render(
    instance: state.Instance,
    data: dict[str, Any],
    out: Console,
    *,
    history: dict[str, Any] | None = None,
    verbose: bool = False,
) -> None:
    """Print a status document: health first, then addresses, replicas, tiers and totals."""
    models = list((data.get("gateway") or {}).get("models") or ())
    parts = [health_line(data, history), *head(instance, models), *overview(data)]
    if verbose:
        parts += details(data)
    for part in parts:
        out.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))


def health_line(data: Mapping[str, Any], history: Mapping[str, Any] | None) -> Text:
    """Return the app's state in its colour, and why it has it; for an app that is ok, its load."""
    health = data.get("health")
    if health is None:
        return Text("the gateway does not tell the app's health")
    state = str(health["state"])
    told = f"{health['answering']} of {health['expected']} replicas answer"
    if health["problems"]:
        text = "; ".join([*health["problems"], told])
    else:
        text = ", ".join([told, *_traffic((history or {}).get("last") or {})])
    word = "OK" if state == "ok" else state
    return Text.assemble((word, f"bold {STYLES.get(state, '')}"), f": {text}")


def _traffic(last: Mapping[str, Any]) -> Iterator[str]:
    """Yield the last minute's rates and times that are known."""
    if not last:
        return
    if not last.get("requests_per_s"):
        yield "no request in the last minute"
        return
    yield f"{last['requests_per_s']:.2g} requests/s"
    if last.get("ttft_p50_s") is not None:
        yield f"TTFT p50 {human_time(last['ttft_p50_s'])}"
    if last.get("tokens_per_s"):
        yield f"{last['tokens_per_s']:.3g} tokens/s"


def head(instance: state.Instance, models: Sequence[str] = ()) -> Iterator[Part]:
    """Yield the instance's models, its addresses, and the time since its start.

    Args:
        models: the names of its models, if there are several.
    """
    where = f"{', '.join(models) or instance.model} at {instance.endpoint}/v1"
    if instance.started_at:
        up_for = human_seconds(max(0.0, time.time() - instance.started_at))
        where = f"{instance.name}: {where}, up for {up_for}"
    yield _whole(where)
    yield _whole(f"console: {instance.endpoint}/console")
    if instance.dashboard_url:
        yield _whole(f"Ray's dashboard: {instance.dashboard_url}")
        yield _whole(f"  its token: {token_file(instance)}")


def token_file(instance: state.Instance) -> str:
    """Return the file with the token that Ray's dashboard asks for."""
    return f"{instance.temp_dir}/ray-token"


def _whole(text: str) -> Text:
    """Return a line that is never broken, so that addresses and paths can be copied."""
    return Text(text, no_wrap=True)


def overview(data: dict[str, Any]) -> Iterator[Part]:
    """Yield the replicas, the tiers, and the totals that say something."""
    replicas = data.get("replicas") or []
    if not replicas:
        return
    gateway = data.get("gateway") or {}
    yield Text()
    yield replica_table(replicas, unhealthy_replicas(gateway))
    yield Text()
    yield from map(Text, left_out(replicas))
    if data.get("store"):
        yield from store_parts(data["store"])
        yield Text()
    if plans := {kind: count for kind, count in (data.get("plans") or {}).items() if count}:
        yield Text("plans: " + ", ".join(f"{count:,} {kind}" for kind, count in plans.items()))
    for name, model in gateway_models(gateway).items():
        of, router = f" for {name}" if name else "", model.get("router") or {}
        if router.get("replicas"):  # else there is one decode replica, which plans for itself
            yield Text(f"placed by this gateway{of}: {placement(router)}")
        queue = model.get("queue")
        if queue and any(queue[each] for each in ("waiting", "waited", "refused", "expired")):
            yield Text(f"queue of this gateway{of}: {admission(queue)}")
    yield from map(Text, batches(gateway.get("batches") or []))
    yield from map(Text, reused(replicas))
    if data.get("advice"):
        yield Text(advice(data["advice"]))
    for name, report in (data.get("advice_by_model") or {}).items():
        if report:
            yield Text(f"{name}: {advice(report)}")


def details(data: dict[str, Any]) -> Iterator[Part]:
    """Yield what a developer asks for: steps, transfers and the routers' cost models."""
    replicas = data.get("replicas") or []
    if replicas:
        yield Text()
        yield detail_table(replicas)
    if data.get("nixl_bytes"):
        yield Text(f"moved over NIXL: {human_bytes(data['nixl_bytes'])}")
    for replica in replicas:
        if fits := (replica.get("router") or {}).get("fits"):
            yield Text()
            yield fit_table(short_name(replica), fits)


def left_out(replicas: list[dict[str, Any]]) -> list[str]:
    """Describe what engines run without, and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for replica in replicas:
        for part in (replica.get("left_out") or {}).items():
            found.setdefault(part, []).append(short_name(replica))
    return [
        f"no {part.replace('_', ' ')} at {', '.join(names)}: {why}"
        for (part, why), names in found.items()
    ]


def placement(router: dict[str, Any]) -> str:
    """Describe a gateway's view of the replicas, and its placement of requests."""
    plans = router["plans"]
    kinds = ", ".join(f"{plans.get(kind, 0)} {kind}" for kind in ("local", "remote"))
    held = plans.get("held_tokens", 0) / max(1, plans.get("prompt_tokens", 0))
    return (
        f"{kinds}; {held:.0%} of their prompt tokens were held; "
        f"{router['replicas']} replicas known, oldest report {router['oldest_report_s']:.1f} s"
    )


def admission(queue: dict[str, Any]) -> str:
    """Describe a gateway's queue, and the fate of the requests that came."""
    return (
        f"{queue['waiting']} wait, of {queue['tenants_waiting']} tenants, the last about "
        f"{queue['predicted_wait_s']:.1f} s; {queue['background_waiting']} in the background; "
        f"{queue['admitted']:,} admitted, {queue['waited']:,} of them after a wait, "
        f"{queue['refused']:,} refused, {queue['expired']:,} given up"
    )


def batches(unfinished: list[dict[str, Any]]) -> list[str]:
    """Describe the progress of unfinished batches."""
    return [
        f"batch {each['id'][:14]}{' of ' + each['tenant'] if each['tenant'] else ''}: "
        f"{each['status']}, {each['completed'] + each['failed']:,} of {each['total']:,} "
        f"lines done, {each['failed']:,} failed, {each['in_flight']:,} in flight"
        for each in unfinished
    ]


def reused(replicas: list[dict[str, Any]]) -> list[str]:
    """Describe the part of the prompts that caches saved, and the part that they could have."""
    found = [(replica.get("router") or {}).get("outcomes") for replica in replicas]
    names = ("prompt_tokens", "reachable_tokens", "reached_tokens")
    sums = {name: sum(one[name] for one in found if one) for name in names}
    tokens = max(1.0, sums["prompt_tokens"])
    if not sums["reachable_tokens"]:
        return []
    return [
        f"prompt tokens reused from caches: {sums['reached_tokens'] / tokens:.0%}; cached somewhere"
        f": {sums['reachable_tokens'] / tokens:.0%}"
    ]


def advice(report: dict[str, Any]) -> str:
    """Describe whether disaggregation pays, and how many replicas of each role it takes."""

    def seen(split: dict[str, Any]) -> str:
        if split["ttft_s"] is None:
            return "overloaded"
        return f"{split['ttft_s']:.2f} s to the first token, {1e3 * split['token_s']:.0f} ms each"

    def name(split: dict[str, Any]) -> str:
        return f"{split['prefill']} prefill + {split['decode']} decode"

    best, now, colocated = report["best"], report["now"], report["colocated"]
    if report["disaggregation_pays"]:
        text = f"disaggregation pays; best of these engines: {name(best)} ({seen(best)})"
        text += f", without prefill engines {seen(colocated)}"
        shown = [best, colocated]
    else:
        text = f"disaggregation does not pay: without prefill engines {seen(colocated)}"
        shown = [colocated]
    if now not in shown:
        text += f", now {seen(now)}"
    text += (
        f"; disaggregation takes {report['prefill']} prefill and {report['decode']} decode replicas"
    )
    if not report["disaggregation_pays"] and now["prefill"]:
        text += "; prefill.autoscaling.min_replicas: 0 stops prefill replicas that are not needed"
    return f"advice, for {report['rate']:.2g} requests a second: {text}"


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table. Text columns fold and are never cut."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def replica_table(replicas: list[dict[str, Any]], unhealthy: dict[str, str]) -> Table:
    """Return one row per replica: requests, KV cache use and prompt tokens computed.

    Args:
        unhealthy: states of the replicas that are not healthy, by id.
    """
    names = ("running", "waiting", "KV used", "prompt tokens computed")
    shown = [one for one in replicas if one.get("replica_id") in unhealthy]
    table = _table("replicas", "replica", *(["state"] if shown else []), right=names)
    for replica in replicas:
        states = [unhealthy.get(str(replica.get("replica_id")), "OK")] if shown else []
        table.add_row(
            short_name(replica),
            *states,
            str(replica.get("running", "?")),
            str(replica.get("waiting", "?")),
            f"{replica.get('kv_usage', 0.0):.1%}",
            f"{replica.get('prompt_tokens_computed', 0):,}",
        )
    return table


def detail_table(replicas: list[dict[str, Any]]) -> Table:
    """Return one row per replica: steps, and bytes moved over NIXL."""
    table = _table("steps and transfers", "replica", right=("steps", "NIXL"))
    for replica in replicas:
        nixl = replica.get("nixl") or {}
        moved = human_bytes(nixl.get("bytes", 0))
        if nixl.get("failures"):
            moved += f", {nixl['failures']} failed"
        table.add_row(short_name(replica), f"{replica.get('steps', 0):,}", moved)
    return table


def store_parts(nodes: list[dict[str, Any]]) -> Iterator[Part]:
    """Yield one row per working tier of each machine's KV store, and a line for each other tier."""
    several = len(nodes) > 1
    names = ("tier", "state") if not several else ("machine", "tier", "state")
    table = _table("KV store", *names, right=("blocks", "used", "hits", "misses"))
    lines = []
    for node in nodes:
        machine = str(node.get("machine", "?"))[:8]
        where, at = ([machine], f" of machine {machine}") if several else ([], "")
        if "tiers" not in node:
            lines.append(f"store{at}: no node: {node.get('down') or 'it does not answer'}")
        for name, tier in node.get("tiers", {}).items():
            state, reason = str(tier.get("state", "?")), tier.get("reason")
            if state != "on":
                lines.append(f"tier {name}{at} is {state}" + (f": {reason}" if reason else ""))
            if state != "off":
                blocks, hits, misses = (f"{tier.get(k, 0):,}" for k in ("blocks", "hits", "misses"))
                used, size = (human_bytes(tier.get(k, 0)) for k in ("bytes", "size_bytes"))
                table.add_row(*where, name, state, blocks, f"{used} of {size}", hits, misses)
        remote = node.get("remote") or {}
        peers = list((remote.get("peers") or {}).values())
        if peers:
            state = f"{sum(peer.get('state') == 'up' for peer in peers)} of {len(peers)} peers up"
            theirs = sum(sum((peer.get("blocks") or {}).values()) for peer in peers)
            table.add_row(*where, "remote", state, f"{theirs:,}")
    if table.row_count:
        yield table
    yield from map(Text, lines)


def fit_table(replica: str, fits: dict[str, Any]) -> Table:
    """Return the cost models that a replica's router has fitted, with their terms."""
    table = _table(f"cost models fitted by {replica}", "model", "terms")
    for name, terms in fits.items():
        table.add_row(name, _terms(terms))
    return table


def _terms(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_terms(v)}" for k, v in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(_terms(v) for v in value) + "]"
    return str(value)


def short_name(replica: dict[str, Any]) -> str:
    """Return a replica's deployment and the first characters of its id."""
    deployment = str(replica.get("deployment", replica.get("role", "replica")))
    return f"{deployment}/{str(replica.get('replica_id', '?'))[:8]}"
