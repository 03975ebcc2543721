"""The dashboard of the GPUs, from Ray's own metrics and NVIDIA's dcgm-exporter."""

from __future__ import annotations

from scripts.generate.dashboards import promql as q
from scripts.generate.dashboards.panel import DashboardSpec, Kind, Panel
from scripts.generate.dashboards.promql import WINDOW

GPU = ("ip", "GpuIndex")
NAME = "{{ip}} {{GpuIndex}}"
CARD = "{{Hostname}} {{gpu}}"
DCGM = "Needs dcgm-exporter; it shows all GPUs that this Prometheus scrapes."


def gpus() -> DashboardSpec:
    """Return the dashboard."""
    used, free = (q.total(f"ray_node_gram_{what}", *GPU) for what in ("used", "available"))
    watts = f"{q.total('ray_node_gpu_power_milliwatts')} / 1000"
    return DashboardSpec(
        "headrace-gpus",
        "Headrace: GPUs",
        (
            Panel(
                "GPUs",
                "How many GPUs does Ray see on each machine? Ray's own metrics, no exporter.",
                {"{{ip}}": q.total("ray_node_gpus_available", "ip")},
                kind=Kind.STAT,
                size=(24, 4),
            ),
            Panel(
                "Busy",
                "Which share of the time does each GPU run kernels? Full does not mean efficient.",
                {NAME: f"{q.most('ray_node_gpus_utilization', *GPU)} / 100"},
                "percentunit",
                1,
            ),
            Panel(
                "Memory in use",
                "Is there room on each GPU? vLLM takes `gpu_memory_utilization` at its start.",
                {NAME: q.share(used, f"({used} + {free})")},
                "percentunit",
                1,
            ),
            Panel(
                "Power",
                "Do the GPUs draw what they should? Little power at full use means waiting.",
                {NAME: f"{q.most('ray_node_gpu_power_milliwatts', *GPU)} / 1000"},
                "watt",
            ),
            Panel(
                "Temperature",
                "Is a GPU about to be throttled?",
                {NAME: q.most("ray_node_gpu_temperature_celsius", *GPU)},
                "celsius",
            ),
            Panel(
                "Energy for an answer token",
                "What does a token cost? The power of all GPUs over the tokens of all answers.",
                {"energy": q.share(watts, q.rate("ray_vllm_generation_tokens_total", WINDOW))},
                "joule",
            ),
            Panel(
                "KV cache in use",
                "Which replicas' GPUs have no room for more requests?",
                {
                    "{{deployment}} {{ReplicaId}}": q.most(
                        q.with_role("ray_vllm_kv_cache_usage_perc"), "deployment", "ReplicaId"
                    )
                },
                "percentunit",
                1,
            ),
            Panel(
                "Tensor cores and memory",
                f"Do arithmetic or memory limit the GPUs? {DCGM}",
                {
                    f"{CARD} tensor cores": "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
                    f"{CARD} memory": "DCGM_FI_PROF_DRAM_ACTIVE",
                },
                "percentunit",
                1,
            ),
            Panel(
                "Last Xid error",
                f"Has the driver reported a fault? 0 is none; NVIDIA lists the numbers. {DCGM}",
                {CARD: "DCGM_FI_DEV_XID_ERRORS"},
                "none",
            ),
        ),
    )
