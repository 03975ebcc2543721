"""The variables at the head of the dashboards, and the series that each of them narrows.

A variable has values that exist: its options are read from the metrics. Models narrow everything:
they choose the Ray sessions of the apps that serve them. Role and replica narrow what engines
and Serve export; the gateways' own metrics are about the whole app.
"""

from __future__ import annotations

from dataclasses import dataclass

from scripts.generate.dashboards.promql import CLUSTER, narrowed

READY = "ray_headrace_gateway_ready_replicas"
HEALTHY = "ray_serve_deployment_replica_healthy"
TENANTS = "ray_headrace_gateway_tenant_requests_total"


@dataclass(frozen=True)
class Variable:
    """A variable with several values.

    Attributes:
        query: Grafana's query of its options.
        all_value: regular expression for "All"; None for the options, one after the other.
    """

    name: str
    label: str
    query: str
    all_value: str | None = None


@dataclass(frozen=True)
class Filter:
    """Variables that belong together.

    Attributes:
        narrowings: a pattern of metrics' names, and the matcher that their series get.
    """

    variables: tuple[Variable, ...]
    narrowings: tuple[tuple[str, str], ...]

    def concerns(self, query: str) -> bool:
        """Return whether the variables narrow a series of the query."""
        return narrowed(query, self.narrowings) != query


SESSION = f'{CLUSTER}=~"${CLUSTER}"'
FILTERS = (
    Filter(
        (
            Variable("model", "Model", f"label_values({READY}, model)", ".*"),
            Variable(
                CLUSTER, "Ray session", f'label_values({READY}{{model=~"$model"}}, {CLUSTER})'
            ),
        ),
        (
            ("ray_", SESSION),
            # The alert that no gateway is seen has no session.
            ("ALERTS", f'{CLUSTER}=~"${CLUSTER}|"'),
        ),
    ),
    Filter(
        (
            Variable("role", "Role", f"label_values({HEALTHY}{{{SESSION}}}, deployment)", ".*"),
            Variable(
                "replica",
                "Replica",
                f'label_values({HEALTHY}{{{SESSION}, deployment=~"$role"}}, replica)',
            ),
        ),
        (
            ("ray_serve_", 'deployment=~"$role"'),
            ("ray_vllm_", 'ReplicaId=~"$replica"'),
            ("ray_headrace_(?!gateway_|store_)", 'replica=~"$replica"'),
        ),
    ),
    Filter(
        (Variable("tenant", "Tenant", f"label_values({TENANTS}{{{SESSION}}}, tenant)", ".*"),),
        (("ray_headrace_gateway_tenant_", 'tenant=~"$tenant"'),),
    ),
)


def filtered(query: str) -> str:
    """Return the query with the matchers of all variables."""
    return narrowed(query, [rule for each in FILTERS for rule in each.narrowings])
