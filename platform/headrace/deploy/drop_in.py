"""The check of Ray's arguments: those that cannot work here, and what to set instead.

`build_app` takes the arguments of `ray.serve.llm:build_pd_openai_app`. One that would have no
effect is refused when the app is built, by name, never ignored. The table in docs/drop-in.md says
what becomes of each. No I/O; of Ray it reads the class of the default ingress.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.llm.ingress import OpenAiIngress

from headrace.config.autoscaling import POLICY

API_KEY = "VLLM_API_KEY"


def refusals(pd: Any, *, own_port: bool = True, key: str = "") -> list[str]:
    """Return one line for each argument that would have no effect.

    Args:
        pd: the validated arguments (`PDServingArgs`).
        own_port: whether gateways listen on a port of their own.
        key: the model's name in `models`; empty if it is the only one.
    """
    at = f"models.{key}." if key else ""
    return [
        line if line.startswith("ingress_") else at + line
        for line in _refusals(pd, own_port=own_port)
    ]


def _refusals(pd: Any, *, own_port: bool) -> list[str]:
    wrong: list[str] = []
    prefill: Mapping[str, Any] = pd.prefill_config.deployment_config
    if may_be_none(prefill) and not _starts_again(prefill):
        wrong.append(
            "prefill_config.deployment_config.autoscaling_config.min_replicas: nothing starts a "
            "prefill replica again once there is none, since decode replicas then prefill by "
            f"themselves; set at least 1, or the policy {POLICY}"
        )
    ingress = pd.ingress_cls_config
    plain = (OpenAiIngress, type(ingress)().ingress_cls)
    if ingress.ingress_cls not in plain or ingress.ingress_extra_kwargs:
        wrong.append(
            "ingress_cls_config: no such class is in a request's way, which leads from a gateway "
            "to a replica; remove it"
        )
    decode: Mapping[str, Any] = pd.decode_config.deployment_config
    if "request_router_config" in decode:
        wrong.append(
            "decode_config.deployment_config.request_router_config: the gateway chooses the decode "
            "replica; remove it, or name a policy in headrace.router.placement"
        )
    if decode.get("max_queued_requests", -1) != -1:
        wrong.append(
            "decode_config.deployment_config.max_queued_requests: requests wait in the gateway; "
            "set headrace.gateway.max_concurrent and queue_timeout_s"
        )
    for name, config in (("prefill", pd.prefill_config), ("decode", pd.decode_config)):
        if (config.runtime_env or {}).get("env_vars", {}).get(API_KEY):
            wrong.append(
                f"{name}_config.runtime_env.env_vars.{API_KEY}: the gateway checks keys; remove it "
                "and set headrace.gateway.api_keys or api_keys_file"
            )
    if own_port and may_be_none(pd.ingress_deployment_config or {}):
        wrong.append(
            "ingress_deployment_config.autoscaling_config.min_replicas: without a gateway "
            "no process listens at headrace.gateway.port; set at least 1"
        )
    return wrong


def may_be_none(deployment: Mapping[str, Any]) -> bool:
    """Whether autoscaling may stop all replicas of a deployment."""
    scaling = deployment.get("autoscaling_config") or {}
    if isinstance(scaling, Mapping):
        return bool(scaling.get("min_replicas", 1) == 0)
    return bool(scaling.min_replicas == 0)


def _starts_again(deployment: Mapping[str, Any]) -> bool:
    """Whether the autoscaling policy is ours, which starts the first prefill replica, too."""
    scaling = deployment.get("autoscaling_config") or {}
    policy = scaling.get("policy") if isinstance(scaling, Mapping) else scaling.policy
    name = policy.get("policy_function") if isinstance(policy, Mapping) else None
    return bool((name or getattr(policy, "policy_function", None)) == POLICY)
