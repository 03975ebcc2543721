"""`headrace status`: prints `GET /headrace/v1/status` as tables."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli import client, state
from headrace.cli.console import human_bytes, human_seconds, stdout

Part = Text | Table
"""A part of the output, for one `print`."""


def status(name: str | None, *, as_json: bool) -> None:
    """Print the state of one instance. Raises CliError if none runs or it does not answer."""
    instance = client.running_instance(name)
    if instance.token_path != "relay":
        data = _serve_only(instance)
    else:
        data = client.get_json(instance, "/headrace/v1/status")
    if as_json:
        print(json.dumps(data, indent=2))
        return
    render(instance, data, stdout())


def _serve_only(instance: state.Instance) -> dict[str, Any]:
    """Return a document of the models alone: without a gateway no component collects more."""
    models = client.get_json(instance, "/v1/models")
    return {"replicas": [], "plans": {}, "nixl_bytes": None, "models": models.get("data", [])}


def render(instance: state.Instance, data: dict[str, Any], out: Console) -> None:
    """Print a status document."""
    replicas = data.get("replicas") or []
    for part in (*head(instance), *overview(instance, data), *fitted(replicas)):
        out.print(part)


def head(instance: state.Instance) -> Iterator[Part]:
    """Yield the instance's model, its address, and the time since its start."""
    where = f"{instance.model} at {instance.endpoint}/v1 ({instance.token_path})"
    if instance.started_at:
        up_for = human_seconds(max(0.0, time.time() - instance.started_at))
        where = f"{instance.name}: {where}, up for {up_for}"
    yield Text(where)
    if instance.dashboard_url:
        yield Text(f"dashboard: {dashboard(instance)}")


def dashboard(instance: state.Instance) -> str:
    """Return the address of Ray's dashboard, and where the token is that it asks for."""
    return f"{instance.dashboard_url}  (it asks for the token in {instance.temp_dir}/ray-token)"


def overview(instance: state.Instance, data: dict[str, Any]) -> Iterator[Part]:
    """Yield the replicas, tiers, and the app's totals."""
    for missing in data.get("incomplete") or ():
        yield Text(f"not known: {missing}")
    replicas = data.get("replicas") or []
    if not replicas:
        yield Text(
            f'no details: token_path "{instance.token_path}" has no gateway, which collects them'
            if instance.token_path != "relay"
            else "no replica answered"
        )
        return
    yield replica_table(replicas)
    if data.get("store"):
        yield store_table(data["store"])
    plans = data.get("plans") or {}
    words = ", ".join(f"{count} {kind}" for kind, count in plans.items()) or "none yet"
    yield Text(f"plans: {words}")
    placed = (data.get("gateway") or {}).get("router")
    if placed and placed["replicas"]:  # else there is one decode replica, which plans for itself
        yield Text(f"placed by this gateway: {placement(placed)}")
    queue = (data.get("gateway") or {}).get("queue")
    if queue:
        yield Text(f"queue of this gateway: {admission(queue)}")
    yield from map(Text, hindsight(replicas))
    if data.get("advice"):
        yield Text(advice(data["advice"]))
    moved = data.get("nixl_bytes")
    if moved is not None:
        yield Text(f"moved over NIXL: {human_bytes(moved)}")


def fitted(replicas: list[dict[str, Any]]) -> Iterator[Part]:
    """Yield the routers' models of cost, and the prefill replicas that they leave out."""
    for replica in replicas:
        fits = (replica.get("router") or {}).get("fits")
        if fits:
            yield fit_table(_short(replica), fits)
            for name, side in (replica["router"].get("prefill") or {}).items():
                breaker = side["breaker"]
                if breaker["state"] != "closed":
                    where = name[:8] or "any replica"
                    yield Text(f"remote prefill at {where} is off: {json.dumps(breaker)}")


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


def hindsight(replicas: list[dict[str, Any]]) -> list[str]:
    """Describe the reachable and the reached hits, and the regret, over all decode replicas."""
    outcomes = [(replica.get("router") or {}).get("outcomes") for replica in replicas]
    sums = {
        name: sum(one[name] for one in outcomes if one)
        for name in ("requests", "prompt_tokens", "reachable_tokens", "reached_tokens")
    }
    cost_s, regret_s = (sum(one[s] for one in outcomes if one) for s in ("cost_s", "regret_s"))
    if not sums["requests"]:
        return []
    all_tokens = max(1, sums["prompt_tokens"])
    return [
        f"prompt tokens that were held somewhere: {sums['reachable_tokens'] / all_tokens:.0%}, "
        f"not computed: {sums['reached_tokens'] / all_tokens:.0%}",
        f"regret: {regret_s / max(cost_s, 1e-9):.1%} of what {sums['requests']:,} plans cost",
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


def replica_table(replicas: list[dict[str, Any]]) -> Table:
    """Return one row per replica: role, queue, KV cache use, tokens computed, bytes moved."""
    table = Table(title="replicas", title_justify="left")
    for column in ("role", "replica"):
        table.add_column(column)
    for column in ("running", "waiting", "KV used", "prompt tokens computed", "steps", "NIXL"):
        table.add_column(column, justify="right")
    for replica in replicas:
        nixl = replica.get("nixl") or {}
        moved = human_bytes(nixl.get("bytes", 0))
        if nixl.get("failures"):
            moved += f", {nixl['failures']} failed"
        table.add_row(
            str(replica.get("role", "?")),
            _short(replica),
            str(replica.get("running", "?")),
            str(replica.get("waiting", "?")),
            f"{replica.get('kv_usage', 0.0):.1%}",
            f"{replica.get('prompt_tokens_computed', 0):,}",
            f"{replica.get('steps', 0):,}",
            moved,
        )
    return table


def store_table(nodes: list[dict[str, Any]]) -> Table:
    """Return one row per tier of each machine's KV store: blocks, size, hits."""
    table = Table(title="KV store", title_justify="left")
    for column in ("machine", "tier", "state"):
        table.add_column(column)
    for column in ("blocks", "used", "size", "hits", "misses"):
        table.add_column(column, justify="right")
    for node in nodes:
        machine = str(node.get("machine", "?"))[:8]
        if "tiers" not in node:
            table.add_row(machine, "-", f"no node: {node.get('down') or 'it does not answer'}")
        for name, tier in node.get("tiers", {}).items():
            state = str(tier.get("state", "?"))
            if state != "on" and tier.get("reason"):
                state += f": {tier['reason']}"
            counts = (f"{tier.get(key, 0):,}" for key in ("blocks", "hits", "misses"))
            blocks, hits, misses = counts if tier.get("state") != "off" else ("-", "-", "-")
            sizes = (human_bytes(tier.get(key, 0)) for key in ("bytes", "size_bytes"))
            table.add_row(machine, name, state, blocks, *sizes, hits, misses)
        remote = node.get("remote") or {}
        peers = list((remote.get("peers") or {}).values())
        if peers or remote.get("address"):
            state = f"{sum(peer.get('state') == 'up' for peer in peers)} of {len(peers)} peers up"
            theirs = sum(sum((peer.get("blocks") or {}).values()) for peer in peers)
            table.add_row(machine, "remote", state, f"{theirs:,}")
    return table


def fit_table(replica: str, fits: dict[str, Any]) -> Table:
    """Return the cost models that a replica's router has fitted, with their terms."""
    table = Table(title=f"models fitted by {replica}", title_justify="left")
    table.add_column("model")
    table.add_column("terms")
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


def _short(replica: dict[str, Any]) -> str:
    deployment = str(replica.get("deployment", replica.get("role", "replica")))
    return f"{deployment}/{str(replica.get('replica_id', '?'))[:8]}"
