"""Decides whether an app is ok, degraded or failing, and names what is wrong.

The evidence is the status document and the key figures of the gateway's last minute:

- failing: no replica of any model can answer. A prefill replica stands in when no decode replica
  answers.
- degraded: one of several models cannot answer; a replica is missing, suspect or down; a machine's
  store does not answer, or a tier of it fails; a circuit breaker for remote prefill is open; a part
  of the status is missing; the key file cannot be read again; or more than 5 % of the last minute's
  requests failed.

Pure: no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "degraded", "failing"]
MAX_ERROR_RATE = 0.05
"""Share of failed requests above which an app is degraded."""
ROLES = ("decode", "prefill")


@dataclass(frozen=True)
class Health:
    """The health of an app.

    Attributes:
        state: the worst of what was found.
        problems: sentences, the most important first; empty if the state is `ok`.
        answering: number of replicas that answer.
        expected: number of replicas that Ray Serve runs or starts.
        missing: number of these that do not answer, by role.
    """

    state: State
    problems: list[str] = field(default_factory=list)
    answering: int = 0
    expected: int = 0
    missing: dict[str, int] = field(default_factory=dict)


def assess(status: Mapping[str, Any], last: Mapping[str, Any] | None) -> Health:
    """Return the health of an app.

    Args:
        status: the status document (`GET /headrace/v1/status`).
        last: key figures of the last minute (`last` of `GET /headrace/v1/history`).
    """
    replicas = list(status.get("replicas") or ())
    gateway = status.get("gateway") or {}
    unhealthy = unhealthy_replicas(gateway)
    working = [one for one in replicas if unhealthy.get(one.get("replica_id")) != "down"]
    counts = _counts(status, replicas, by_deployment="models" in gateway)
    problems, failing = [], []
    for name, model in gateway_models(gateway).items():
        of = f" of {name}" if name else ""
        mine = [one for one in working if not name or one.get("model") == name]
        is_decode_gone = not any(one.get("role") == "decode" for one in mine)
        failing.append(is_decode_gone and not model.get("standing_in"))
        if is_decode_gone:
            instead = "" if failing[-1] else ", prefill replicas answer instead"
            problems.append(f"no decode replica{of} answers{instead}")
    fails = all(failing)
    is_model_gone = bool(problems)
    if (rate := (last or {}).get("error_rate")) and rate > MAX_ERROR_RATE:
        problems.append(f"{rate:.0%} of the last minute's requests failed")
    problems += _missing(counts, leaves_out_decode=is_model_gone)
    problems += _replicas(replicas, unhealthy)
    problems += _store(status.get("store") or ())
    problems += [f"the status lacks {missing}" for missing in status.get("incomplete") or ()]
    if gateway.get("keys_stale"):
        problems.append("the key file cannot be read, so the keys of before are in use")
    return Health(
        "failing" if fails else "degraded" if problems else "ok",
        problems,
        len(working),
        sum(expected for _, _, expected in counts.values()),
        {role: sum(n - there for of, there, n in counts.values() if of == role) for role in ROLES},
    )


def gateway_models(gateway: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return a gateway's state of each model by the model's name; of the only model of an app, by
    the empty name."""
    return dict(gateway.get("models") or {"": gateway})


def unhealthy_replicas(gateway: Mapping[str, Any]) -> dict[str, str]:
    """Return the states of the replicas of all models that are not healthy, by id."""
    return {
        replica: state
        for model in gateway_models(gateway).values()
        for replica, state in ((model.get("router") or {}).get("unhealthy") or {}).items()
    }


def _counts(
    status: Mapping[str, Any], replicas: Iterable[Mapping[str, Any]], *, by_deployment: bool
) -> dict[str, tuple[str, int, int]]:
    """Return, by role or by deployment, the role, how many replicas answer, and how many Ray Serve
    runs or starts."""
    found: dict[str, tuple[str, int, int]] = {}
    for role in ROLES:
        answering = Counter(
            str(one.get("deployment") or role) for one in replicas if one.get("role") == role
        )
        expected = Counter(
            {
                name: int(count)
                for name, count in (status.get("expected_replicas") or {}).items()
                if name == role or name.startswith((f"{role}:", f"{role}-")) or name in answering
            }
        )
        if not by_deployment:
            answering = Counter({role: answering.total()})
            expected = Counter({role: expected.total()})
        for name in sorted({*answering, *expected}):
            found[name] = role, answering[name], max(expected[name], answering[name])
    return found


def _missing(
    counts: Mapping[str, tuple[str, int, int]], *, leaves_out_decode: bool
) -> Iterator[str]:
    for name, (role, answering, expected) in counts.items():
        is_told = leaves_out_decode and role == "decode" and not answering
        if (missing := expected - answering) and not is_told:
            verb = "does" if missing == 1 else "do"
            yield f"{missing} of {expected} {name} replicas {verb} not answer"


def _replicas(replicas: Iterable[Mapping[str, Any]], unhealthy: Mapping[str, str]) -> Iterator[str]:
    roles = {one.get("replica_id"): one.get("role") for one in replicas}
    for name, state in unhealthy.items():
        if state in ("down", "suspect"):
            yield f"{roles.get(name) or 'replica'} {name[:8]} is {state}"
    for replica in replicas:
        for name, target in ((replica.get("router") or {}).get("prefill") or {}).items():
            breaker = target.get("breaker") or {}
            if breaker.get("state", "closed") != "closed":
                reason = f": {breaker['reason']}" if breaker.get("reason") else ""
                sender = str(replica.get("replica_id", "?"))[:8]
                where = f"prefill replica {name[:8]}" if name else "any prefill replica"
                yield f"decode {sender} sends no prompts to {where}{reason}"


def _store(nodes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for node in nodes:
        machine = str(node.get("machine", "?"))[:8]
        if "tiers" not in node:
            yield f"the KV store of machine {machine} does not answer"
        for name, tier in node.get("tiers", {}).items():
            if tier.get("state") not in ("on", "off"):
                yield f"the KV store's tier {name} of machine {machine} is {tier.get('state')}"
