"""Small pieces of PromQL: every query of a dashboard or an alert is put together here.

Every series of a Ray cluster has the label `SessionName`. It distinguishes two clusters of one
Prometheus, for example an old and a new one during an upgrade. So everything is summed by it, and
dashboards have a variable of that name, as Ray's own have.

`rate` and `increase` do not see a counter's first value, because Ray exports no counter before it
counts. Alerts are therefore about shares and repetition, or about gauges, which start at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

CLUSTER = "SessionName"
WINDOW = "$__rate_interval"
"""The window of rates in dashboards; Grafana chooses it by the time range."""


def rate(metric: str, window: str, *by: str, **labels: str) -> str:
    """Return the query of a counter's growth a second, summed."""
    return total(f"rate({pick(metric, **labels)}[{window}])", *by)


def grown(metric: str, window: str, *by: str, **labels: str) -> str:
    """Return the query of a counter's growth over a window, summed."""
    return total(f"increase({pick(metric, **labels)}[{window}])", *by)


def total(query: str, *by: str) -> str:
    """Return the query of a vector's sum by cluster and labels."""
    return f"sum by ({', '.join((CLUSTER, *by))}) ({query})"


def most(query: str, *by: str) -> str:
    """Return the query of a vector's maximum by cluster and labels."""
    return f"max by ({', '.join((CLUSTER, *by))}) ({query})"


def share(part: str, whole: str) -> str:
    """Return the query of a ratio that is missing, not NaN, where `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, histogram: str, window: str, *by: str, **labels: str) -> str:
    """Return the query of a quantile from a histogram's buckets."""
    return f"histogram_quantile({q:g}, {rate(histogram + '_bucket', window, 'le', *by, **labels)})"


def quantiles(histogram: str, *quantiles: float, **labels: str) -> dict[str, str]:
    """Return the queries of several quantiles over `WINDOW`, by legend."""
    return {f"p{100 * at:g}": quantile(at, histogram, WINDOW, **labels) for at in quantiles}


def buckets(histogram: str, window: str, **labels: str) -> str:
    """Return the query of the values in each bucket of a histogram, for a heatmap: over all
    clusters, because a heatmap has one row a bucket."""
    return f"sum by (le) (increase({pick(histogram + '_bucket', **labels)}[{window}]))"


def mean(histogram: str, window: str, *by: str, **labels: str) -> str:
    """Return the query of the mean of a histogram's values."""
    sums, counts = (rate(f"{histogram}_{part}", window, *by, **labels) for part in ("sum", "count"))
    return share(sums, counts)


def with_role(metric: str) -> str:
    """Return the query of an engine's metric with Serve's `deployment` (prefill or decode)."""
    health = "ray_serve_deployment_replica_healthy"
    named = f'label_replace({health}, "ReplicaId", "$1", "replica", "(.*)")'
    role = f"max by ({CLUSTER}, ReplicaId, deployment) ({named}) * 0 + 1"
    return f"{metric} * on ({CLUSTER}, ReplicaId) group_left (deployment) ({role})"


def pick(metric: str, **labels: str) -> str:
    """Return a selector. A value is a text; after `~` a regular expression, after `!~` one that
    must not match, after `!` a text that must differ."""
    matchers = ", ".join(f"{name}{_match(value)}" for name, value in labels.items())
    return f"{metric}{{{matchers}}}" if matchers else metric


def narrowed(query: str, rules: Sequence[tuple[str, str]]) -> str:
    """Return the query with more matchers on its series.

    Args:
        rules: a pattern of metrics' names, which begin with `ray_` or are `ALERTS`, and the matcher
            that their series get.
    """

    def add(found: re.Match[str]) -> str:
        more = [matcher for pattern, matcher in rules if re.match(pattern, found[1])]
        others = (found[2] or "").strip("{}")
        matchers = ", ".join(filter(None, (*more, others)))
        return f"{found[1]}{{{matchers}}}" if matchers else found[0]

    return re.sub(r"\b(ray_\w+|ALERTS)\b(\{[^}]*\})?", add, query)


def _match(value: str) -> str:
    for sign, operator in (("!~", "!~"), ("~", "=~"), ("!", "!=")):
        if value.startswith(sign):
            return f'{operator}"{value.removeprefix(sign)}"'
    return f'="{value}"'
