"""Our own metrics, through Ray's export: every name starts with `headrace_` (Ray puts `ray_`
before it).

Ray Serve's classes add the labels `deployment`, `replica` and `application` of the replica that
makes a metric. vLLM's engine metrics take the same way under `vllm_`. `node_metrics` collects both
from the nodes' own export ports, for `GET /metrics`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

import ray
from ray.serve.metrics import Counter, Gauge, Histogram

from headrace.observability.gateway_metrics import GatewayMetrics
from headrace.observability.totals import TotalCounter
from headrace_kvstore.protocol.address import host_port

TTFT_BUCKETS_S = [0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 30.0]
OWN_BUCKETS_S = [0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05]
EXPORTED_PREFIXES = ("ray_headrace_", "ray_vllm_", "ray_serve_", "ray_node_gpu", "ray_node_gram_")


class RayGatewayMetrics(GatewayMetrics):
    """The gateway's metrics, as Ray's."""

    def __init__(self) -> None:
        self._requests = Counter(
            "headrace_gateway_requests", "Requests answered.", tag_keys=("model", "path", "status")
        )
        self._ttft = Histogram(
            "headrace_gateway_ttft_seconds",
            "Seconds from a request's arrival to the first byte of its answer.",
            boundaries=TTFT_BUCKETS_S,
            tag_keys=("model", "path", "streamed"),
        )
        self._seconds = Histogram(
            "headrace_gateway_request_seconds",
            "Seconds from a request's arrival to the last byte of its answer.",
            boundaries=[*TTFT_BUCKETS_S, 60.0, 120.0, 600.0],
            tag_keys=("model", "path"),
        )
        self._tenant_requests = Counter(
            "headrace_gateway_tenant_requests",
            "Requests answered, by the tenant that the API key proves; none without keys.",
            tag_keys=("tenant", "model", "status"),
        )
        self._tenant_tokens = Counter(
            "headrace_gateway_tenant_tokens",
            "Answer tokens, by the tenant that the API key proves; none without keys.",
            tag_keys=("tenant", "model"),
        )
        self._overhead = Histogram(
            "headrace_gateway_overhead_seconds",
            "Seconds that the gateway adds before a request goes to a replica.",
            boundaries=OWN_BUCKETS_S,
        )
        self._refused = Counter(
            "headrace_gateway_refused",
            "Requests that the gateway itself refused, or streams that it ended with an error.",
            tag_keys=("status", "code"),
        )
        self._techniques = Counter(
            "headrace_gateway_techniques",
            "Answers by the lossy techniques that could change their KV; `exact` for none.",
            tag_keys=("techniques",),
        )
        self._lost = Counter(
            "headrace_gateway_replica_losses",
            "Requests whose replica was lost, by when: before, during or after its work on them.",
            tag_keys=("model", "when"),
        )
        self._ready = Gauge(
            "headrace_gateway_ready_replicas", "Decode replicas that answer.", tag_keys=("model",)
        )
        self._in_flight = Gauge(
            "headrace_gateway_requests_in_flight",
            "Requests at replicas, or waiting for one.",
            tag_keys=("model",),
        )
        self._keys_stale = Gauge(
            "headrace_gateway_keys_stale",
            "1 while the key file has changed and cannot be read: older keys stay accepted.",
        )
        self._oldest = Gauge(
            "headrace_gateway_oldest_report_seconds",
            "Age of the oldest report that this gateway plans with.",
            tag_keys=("model",),
        )
        self._queued = Histogram(
            "headrace_gateway_queue_seconds",
            "Seconds that a request waited in the gateway's queue before it went to a replica.",
            boundaries=TTFT_BUCKETS_S,
            tag_keys=("model", "slo"),
        )
        self._waiting = Gauge(
            "headrace_gateway_queue_length",
            "Requests in the gateway's queue.",
            tag_keys=("model",),
        )
        self._wait = Gauge(
            "headrace_gateway_predicted_wait_seconds",
            "Predicted wait of the last request in the gateway's queue.",
            tag_keys=("model",),
        )

    def request_done(
        self,
        model: str,
        path: str,
        status: int,
        ttft_s: float | None,
        seconds: float,
        streamed: bool,
    ) -> None:
        place = {"model": model, "path": path}
        self._requests.inc(tags={**place, "status": str(status)})
        if ttft_s is not None:
            self._ttft.observe(ttft_s, tags={**place, "streamed": "yes" if streamed else "no"})
        self._seconds.observe(seconds, tags=place)

    def tenant_done(self, tenant: str, model: str, status: int, tokens: int | None) -> None:
        whose = {"tenant": tenant, "model": model}
        self._tenant_requests.inc(tags={**whose, "status": str(status)})
        if tokens:
            self._tenant_tokens.inc(tokens, tags=whose)

    def own_seconds(self, seconds: float) -> None:
        self._overhead.observe(seconds)

    def refused(self, status: int, code: str) -> None:
        self._refused.inc(tags={"status": str(status), "code": code})

    def techniques(self, applied: str) -> None:
        self._techniques.inc(tags={"techniques": applied})

    def replica_lost(self, model: str, when: str) -> None:
        self._lost.inc(tags={"model": model, "when": when})

    def queued(self, model: str, slo: str, seconds: float) -> None:
        self._queued.observe(seconds, tags={"model": model, "slo": slo})

    def queue(self, model: str, waiting: int, predicted_wait_s: float) -> None:
        self._waiting.set(waiting, tags={"model": model})
        self._wait.set(predicted_wait_s, tags={"model": model})

    def keys_stale(self, stale: bool) -> None:
        self._keys_stale.set(float(stale))

    def state(self, model: str, ready: int, relaying: int, oldest_report_s: float) -> None:
        tags = {"model": model}
        self._ready.set(ready, tags=tags)
        self._in_flight.set(relaying, tags=tags)
        self._oldest.set(oldest_report_s, tags=tags)


class RayPlanMetrics:
    """Metrics of the plans: their kinds, their predictions and their results."""

    def __init__(self) -> None:
        self._plans = Counter("headrace_plans", "Plans made.", tag_keys=("kind",))
        self._failures = Counter("headrace_remote_prefill_failures", "Remote prefills given up.")
        self._predicted = Histogram(
            "headrace_plan_ttft_error_ratio",
            "Measured TTFT over predicted TTFT.",
            boundaries=[0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2.0, 4.0],
            tag_keys=("kind",),
        )
        self._overhead = Histogram(
            "headrace_planning_seconds", "Seconds to make a plan.", boundaries=OWN_BUCKETS_S
        )
        self._bytes = TotalCounter("headrace_nixl_bytes", "Bytes pulled over NIXL.")
        self._lookups = TotalCounter(
            "headrace_kv_lookup_failures",
            "Lookups in the machine's StoreNode without an answer.",
            tag_keys=("kind",),
        )
        self._replaced = Counter(
            "headrace_plans_replaced",
            "Gateways' plans that the decode replica replaced, because they were out of date.",
        )
        self._tokens = TotalCounter(
            "headrace_plan_prompt_tokens",
            "Prompt tokens: all; cached, whose KV was held somewhere; reused, not computed.",
            tag_keys=("kind",),
        )
        self._failing = Gauge(
            "headrace_prefill_replicas_failing",
            "Prefill replicas that get no requests from this decode replica, because they failed.",
        )

    def planned(self, kind: str, seconds: float) -> None:
        self._plans.inc(tags={"kind": kind})
        self._overhead.observe(seconds)

    def failed(self) -> None:
        self._failures.inc()

    def outcome(self, kind: str, ratio: float) -> None:
        self._predicted.observe(ratio, tags={"kind": kind})

    def lookups_failed(self, failures: Mapping[str, int]) -> None:
        """Export the number of failures of each kind since the start."""
        for kind, count in failures.items():
            self._lookups.follow(count, {"kind": kind})

    def plan_replaced(self) -> None:
        self._replaced.inc()

    def update_totals(self, failing: int, sums: Mapping[str, float]) -> None:
        """Export values that are updated about once a second.

        Args:
            failing: number of prefill replicas that get no requests, because they failed.
            sums: `Outcomes.sums`.
        """
        self._failing.set(failing)
        for kind, name in (("all", "prompt"), ("cached", "reachable"), ("reused", "reached")):
            self._tokens.follow(sums[f"{name}_tokens"], {"kind": kind})

    def transferred(self, total_bytes: int) -> None:
        self._bytes.follow(total_bytes)


async def node_metrics(fetch: Callable[[str], Awaitable[bytes]]) -> bytes:
    """Return, as Prometheus text, all nodes' exported metrics of engines, Serve, GPUs and Headrace.

    Args:
        fetch: returns the page at `/metrics` of a server at `http://ip:port`; `b""` if there is
            none.
    """
    nodes = await asyncio.to_thread(ray.nodes)
    urls = [
        f"http://{host_port(node['NodeManagerAddress'], node['MetricsExportPort'])}"
        for node in nodes
        if node["Alive"]
    ]
    pages = await asyncio.gather(*map(fetch, urls))
    return merged(pages)


def merged(pages: Iterable[bytes]) -> bytes:
    """Return one page of those of all nodes: each family once, its samples together.

    Prometheus' text format wants the samples of a family in one group, after one `# HELP` and one
    `# TYPE`. Only families with one of `EXPORTED_PREFIXES` are taken.
    """
    wanted = tuple(prefix.encode() for prefix in EXPORTED_PREFIXES)
    families: dict[bytes, dict[bytes, bytes]] = {}
    for page in pages:
        family = b""
        for line in page.splitlines():
            words = line.split(b" ", 3)
            if line.startswith((b"# HELP ", b"# TYPE ")) and len(words) > 2:
                family, key = words[2], words[1]
            else:
                name, key = line.partition(b"{")[0].partition(b" ")[0], line
                if not family or not name.startswith(family):
                    family = name
            if family.startswith(wanted) and not line.startswith(b"# EOF"):
                families.setdefault(family, {}).setdefault(key, line)
    lines: list[bytes] = []
    for described in families.values():
        heads = [described.pop(key) for key in (b"HELP", b"TYPE") if key in described]
        lines += [*heads, *described.values()]
    return b"\n".join(lines) + b"\n"
