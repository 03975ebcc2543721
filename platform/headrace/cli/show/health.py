"""Decides whether an app is OK, degraded or failing, and says so in one line.

The evidence is the status document and the history of the last minute (`GET /headrace/v1/history`):

- failing: no decode replica answers.
- degraded: a replica is down or suspect, a machine's store does not answer, a tier of it fails, a
  circuit breaker for remote prefill is open, a part of the status is missing, the key file cannot
  be read again, or more than 5 % of the last minute's requests failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.cli.console import human_time

State = Literal["OK", "degraded", "failing"]
MAX_ERROR_RATE = 0.05
"""Share of failed requests above which an app is degraded."""
STYLES: Mapping[State, str] = {"OK": "green", "degraded": "yellow", "failing": "red"}


@dataclass(frozen=True)
class Health:
    """The state of an app, and the line that says why."""

    state: State
    text: str

    def line(self) -> str:
        """Return the state and the reason."""
        return f"{self.state}: {self.text}"


def assess(data: Mapping[str, Any], history: Mapping[str, Any] | None) -> Health:
    """Return the health of an app.

    Args:
        data: the status document.
        history: the document of the last hours; None if the app has none.
    """
    answering = list(data.get("replicas") or ())
    unhealthy = dict(_router(data).get("unhealthy") or {})
    known = {str(one.get("replica_id")) for one in answering}
    known |= {name for name, state in unhealthy.items() if state != "draining"}
    working = [one for one in answering if unhealthy.get(one.get("replica_id")) != "down"]
    last = (history or {}).get("last") or {}
    told = f"{len(working)} of {len(known)} replicas answer"
    if not any(one.get("role") == "decode" for one in working):
        return Health("failing", f"no decode replica answers ({told})")
    wrong = list(_problems(data, unhealthy))
    if (rate := last.get("error_rate")) and rate > MAX_ERROR_RATE:
        wrong.insert(0, f"{rate:.0%} of the last minute's requests failed")
    if wrong:
        return Health("degraded", "; ".join([*wrong, told]))
    return Health("OK", ", ".join([told, *_traffic(last)]))


def _router(data: Mapping[str, Any]) -> Mapping[str, Any]:
    return (data.get("gateway") or {}).get("router") or {}


def _problems(data: Mapping[str, Any], unhealthy: Mapping[str, str]) -> Iterator[str]:
    roles = {one.get("replica_id"): one.get("role") for one in data.get("replicas") or ()}
    for name, state in unhealthy.items():
        if state in ("down", "suspect"):
            yield f"{roles.get(name) or 'replica'} {name[:8]} is {state}"
    for replica in data.get("replicas") or ():
        for name, target in ((replica.get("router") or {}).get("prefill") or {}).items():
            if target["breaker"]["state"] != "closed":
                yield f"remote prefill at {name[:8] or 'any replica'} is off"
    for node in data.get("store") or ():
        machine = str(node.get("machine", "?"))[:8]
        if "tiers" not in node:
            yield f"the store of machine {machine} does not answer"
        for name, tier in node.get("tiers", {}).items():
            if tier.get("state") not in ("on", "off"):
                yield f"store tier {name} of machine {machine} is {tier.get('state')}"
    for missing in data.get("incomplete") or ():
        yield f"the status lacks {missing}"
    if (data.get("gateway") or {}).get("keys_stale"):
        yield "the key file cannot be read, so the keys of before are in use"


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
