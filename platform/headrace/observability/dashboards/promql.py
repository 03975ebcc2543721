"""Small pieces of PromQL: every query of a dashboard or an alert is put together here.

Every series of a Ray cluster has the label `SessionName`, which tells two clusters of one
Prometheus apart, for example an old and a new one during an upgrade. So everything is summed by
it, and dashboards have a variable of that name, as Ray's own have.

A counter's first value is not seen by `rate` and `increase`, because Ray exports no counter before
it counts. Alerts are therefore about shares and repetition, or about gauges, which start at once.
"""

from __future__ import annotations

import re

CLUSTER = "SessionName"


def rate(metric: str, window: str, *by: str, **labels: str) -> str:
    """Growth a second of a counter, summed."""
    return total(f"rate({pick(metric, **labels)}[{window}])", *by)


def grown(metric: str, window: str, *by: str, **labels: str) -> str:
    """Growth of a counter over a window, summed."""
    return total(f"increase({pick(metric, **labels)}[{window}])", *by)


def total(query: str, *by: str) -> str:
    """Sum of a vector by cluster and labels."""
    return f"sum by ({', '.join((CLUSTER, *by))}) ({query})"


def most(query: str, *by: str) -> str:
    """Greatest of a vector by cluster and labels."""
    return f"max by ({', '.join((CLUSTER, *by))}) ({query})"


def share(part: str, whole: str) -> str:
    """A ratio that is missing, not NaN, where there is nothing."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, histogram: str, window: str, *by: str, **labels: str) -> str:
    """A quantile from a histogram's buckets."""
    return f"histogram_quantile({q:g}, {rate(histogram + '_bucket', window, 'le', *by, **labels)})"


def mean(histogram: str, window: str, *by: str, **labels: str) -> str:
    """The mean of a histogram's values."""
    sums, counts = (rate(f"{histogram}_{part}", window, *by, **labels) for part in ("sum", "count"))
    return share(sums, counts)


def with_role(metric: str) -> str:
    """An engine's metric, with the `deployment` (prefill or decode) that Serve knows it by."""
    health = "ray_serve_deployment_replica_healthy"
    named = f'label_replace({health}, "ReplicaId", "$1", "replica", "(.*)")'
    role = f"max by ({CLUSTER}, ReplicaId, deployment) ({named}) * 0 + 1"
    return f"{metric} * on ({CLUSTER}, ReplicaId) group_left (deployment) ({role})"


def pick(metric: str, **labels: str) -> str:
    """A selector; a value that begins with `~` is a regular expression, with `!~` one that must not
    match, with `!` another text."""
    matchers = ", ".join(f"{name}{_match(value)}" for name, value in labels.items())
    return f"{metric}{{{matchers}}}" if matchers else metric


def narrowed(query: str, matcher: str) -> str:
    """The query with one more matcher on each of its series, which all are Ray's by their names."""

    def add(found: re.Match[str]) -> str:
        others = (found[2] or "").strip("{}")
        return f"{found[1]}{{{', '.join(filter(None, (matcher, others)))}}}"

    return re.sub(r"\b(ray_\w+)(\{[^}]*\})?", add, query)


def _match(value: str) -> str:
    for sign, operator in (("!~", "!~"), ("~", "=~"), ("!", "!=")):
        if value.startswith(sign):
            return f'{operator}"{value.removeprefix(sign)}"'
    return f'="{value}"'
