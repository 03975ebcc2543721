"""`build_app(args)`: the whole serving graph, in place of `ray.serve.llm:build_pd_openai_app`.

    relay   (default)  client -> gateway -> decode replica's own port
    direct             client -> HAProxy -> decode replica: Ray's fast path, where clients resume
    classic            client -> Serve proxy -> ingress -> actor call: Ray's default

Each of them continues with decode -> prefill, as planned per request, both over one KV store.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ray import serve
from ray.serve.deployment import Application
from ray.serve.llm import build_dp_deployment, build_llm_deployment
from ray.serve.llm.ingress import make_fastapi_ingress

from headrace.config import AppSection, to_app_args
from headrace.config.integrity import IntegritySection
from headrace.config.load import validate
from headrace.deploy.adapters import take_adapters, with_readable_paths
from headrace.deploy.blending import add_blending
from headrace.deploy.drop_in import refusals
from headrace.deploy.sparse_attention import add_sparse_attention
from headrace.deploy.speculative_decoding import (
    add_speculative_decoding,
    tenants_of,
    why_no_speculation,
)
from headrace.deploy.store import add_store, why_no_store
from headrace.observability import ProcessSetup
from headrace.observability.engine import export_left_out
from headrace.observability.speculation import RaySpeculationMetrics
from headrace.replica.planner import RouterPlanner
from headrace.replica.prefill_fallback import PrefillFallback
from headrace_decode.llm.vllm_engine import PlannedVLLMEngine
from headrace_decode.server import DecodeServer, DPDecodeServer
from headrace_decode.wiring import DecodeWiring
from headrace_engine.adapters.settings import AdapterSettings
from headrace_engine.kv_transfer.compatibility import CHECKS_KEY
from headrace_engine.ray.engine import LEFT_OUT_KEY
from headrace_engine.ray.llm import (
    PDServingArgs,
    build_direct_streaming_deployment,
    build_ingress_request_router,
    maybe_apply_llm_deployment_config_defaults,
    to_model_metadata,
    with_ingress_request_router,
)
from headrace_engine.serving.drain_timeouts import drain_options
from headrace_engine.serving.parsers import shared
from headrace_engine.serving.request_router import routed_as
from headrace_prefill.server import DPPrefillServer, FallbackServing, PrefillServer

logger = logging.getLogger(__name__)


def build_app(args: dict[str, Any]) -> Application:
    """Build the app.

    Args:
        args: what `build_pd_openai_app` takes (`prefill_config`, `decode_config`,
        `ingress_cls_config`, `ingress_deployment_config`), and `headrace`, the section
        `headrace.config.AppSection`.

    Raises:
        pydantic.ValidationError: a field is unknown or its value impossible.
        ValueError: an argument would have no effect (`deploy.drop_in`), or the token path needs an
            environment that the process does not have.
    """
    section = AppSection.model_validate(args.get("headrace") or {})
    if "port" not in section.gateway.model_fields_set:
        # Under a Serve config, Serve's proxy is in front; a port of our own must be asked for.
        if section.gateway.tls is not None:
            raise ValueError(
                "gateway.tls_cert_file: set gateway.port, too: Serve's proxy has no TLS"
            )
        gateway = section.gateway.model_copy(update={"port": None})
        section = section.model_copy(update={"gateway": gateway})
    rays = with_readable_paths({k: v for k, v in args.items() if k != "headrace"})
    pd = PDServingArgs.model_validate(rays)
    if wrong := refusals(pd, section.token_path, own_port=section.gateway.port is not None):
        raise ValueError("; and ".join(wrong))
    setup = ProcessSetup(**section.observability.model_dump())
    if section.observability.otlp_endpoint:
        for config in (pd.prefill_config, pd.decode_config):
            _trace_engine(config, section.observability.otlp_endpoint)
    adapters = take_adapters(pd) if section.token_path == "relay" else None
    engines = [pd.prefill_config.engine_kwargs, pd.decode_config.engine_kwargs]
    engines[0].update(shared(decode=engines[1], prefill=engines[0]))
    for engine in engines:
        _use_own_nixl(engine, section.integrity)
    for config in (pd.prefill_config, pd.decode_config):
        is_decode = config is pd.decode_config
        if left_out := _left_out(section, config.engine_kwargs, is_decode=is_decode):
            more = {LEFT_OUT_KEY: left_out}
            config.experimental_configs = {**config.experimental_configs, **more}
    saves = section.speculation.enabled and section.speculation.save
    store = add_store(section.store, engines, setup, save_gossip=saves)
    add_speculative_decoding(section.speculation, pd.decode_config.engine_kwargs)
    make_blending_planner = add_blending(section.techniques.blending, engines)
    add_sparse_attention(section.techniques, engines, engines[1:])
    prefill = _deployment(
        pd.prefill_config,
        "prefill",
        PrefillServer,
        DPPrefillServer,
        {
            "setup": setup,
            "store": store,
            "fallback": _prefill_fallback(pd, section.token_path),
            "adapters": adapters,
            "export_left_out": export_left_out,
        },
        section.drain_s,
    )
    wiring = DecodeWiring(
        make_planner=RouterPlanner(section.router.to_settings()),
        listen=_listen if section.token_path == "relay" else None,
        setup=setup,
        adapters=adapters,
        tenants=tenants_of(section.speculation),
        drafting_metrics=RaySpeculationMetrics,
        export_left_out=export_left_out,
        make_blending_planner=make_blending_planner,
        system_prompts=tuple(section.store.system_prompts) if store is not None else (),
    )
    bind = {"prefill_server": prefill, "wiring": wiring, "store": store}
    if section.token_path == "direct":
        return _direct(pd, bind, section.drain_s)
    decode = _deployment(
        pd.decode_config, "decode", DecodeServer, DPDecodeServer, bind, section.drain_s
    )
    if section.token_path == "classic":
        return _classic(pd, decode)
    return _relay(pd, section, decode, prefill, store, setup, adapters=adapters)


def build_configured(args: dict[str, Any]) -> Application:
    """Build the app from a configuration, as `headrace up` does.

    `args` is the file of docs/configuration.md. Its section `ray` has no effect: the cluster runs
    already. The files that it names must be where gateways run.

    Raises:
        ConfigError: the configuration cannot be used; with a line for each problem.
    """
    return build_app(to_app_args(validate(args, files_here=False)))


def _left_out(section: AppSection, engine: dict[str, Any], *, is_decode: bool) -> dict[str, str]:
    """Return the configured parts that an engine's own arguments leave out, with the reasons."""
    reasons = {
        "store": why_no_store(engine) if section.store.enabled else None,
        "speculation": (
            why_no_speculation(engine) if section.speculation.enabled and is_decode else None
        ),
    }
    return {part: why for part, why in reasons.items() if why is not None}


def _prefill_fallback(pd: PDServingArgs, token_path: str) -> FallbackServing | None:
    """Return how prefill replicas answer in place of decode replicas; None where they cannot."""
    if token_path != "relay" or _is_grouped(pd.prefill_config):
        return None
    return FallbackServing(PlannedVLLMEngine, PrefillFallback)


def _use_own_nixl(engine: dict[str, Any], integrity: IntegritySection) -> None:
    """If an engine's connector is vLLM's NixlConnector, load ours of that name instead."""
    transfer = engine.get("kv_transfer_config")
    if not isinstance(transfer, dict) or transfer.get("kv_connector") != "NixlConnector":
        return
    if "kv_connector_module_path" in transfer:
        return
    transfer["kv_connector_module_path"] = "headrace_engine.pull_proof.connector"
    transfer.setdefault("kv_load_failure_policy", "recompute")
    transfer["kv_connector_extra_config"] = {
        **(transfer.get("kv_connector_extra_config") or {}),
        CHECKS_KEY: integrity.model_dump(),
    }


def _trace_engine(config: Any, otlp_endpoint: str) -> None:
    """Have vLLM make its own span of each request, as a child of ours."""
    url = otlp_endpoint.rstrip("/") + "/v1/traces"
    config.engine_kwargs.setdefault("otlp_traces_endpoint", url)
    env = (config.runtime_env or {}).get("env_vars", {})
    protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    config.runtime_env = {**(config.runtime_env or {}), "env_vars": {**protocol, **env}}


async def _listen(app: Any, host: str, port: int) -> Any:
    from headrace.gateway.ingress.http_server import GATEWAY_READS_S, serve_gateway

    return await serve_gateway(app, host, port, send_timeout_s=GATEWAY_READS_S)


def _deployment(
    config: Any,
    role: str,
    plain: type,
    data_parallel: type,
    bind_kwargs: dict[str, Any],
    drain_s: float,
) -> Application:
    grouped = _is_grouped(config)
    build = build_dp_deployment if grouped else build_llm_deployment
    return build(
        config,
        bind_kwargs=bind_kwargs,
        override_serve_options=_options(config, role, drain_s, routed=True),
        deployment_cls=data_parallel if grouped else plain,
    )


def _is_grouped(config: Any) -> bool:
    """Whether a replica is one rank of a data-parallel group."""
    return bool(config.engine_kwargs.get("data_parallel_size", 1) > 1)


def _may_be_zero(config: Any) -> bool:
    """Whether Serve may stop every replica of a role."""
    scaling = (config.deployment_config or {}).get("autoscaling_config") or {}
    if not isinstance(scaling, dict):
        scaling = scaling.model_dump()
    return scaling.get("min_replicas", 1) == 0


def _options(config: Any, role: str, drain_s: float, *, routed: bool) -> dict[str, Any]:
    """Return a role's deployment options, without those that the user has set.

    Args:
        routed: whether handles let the caller name a replica.
    """
    options: dict[str, Any] = dict(drain_options(drain_s))
    if routed:
        options["request_router_config"] = routed_as(role)
    given = config.deployment_config
    return {"name": role} | {key: value for key, value in options.items() if key not in given}


def _relay(
    pd: PDServingArgs,
    section: AppSection,
    decode: Application,
    prefill: Application,
    store: Application | None,
    setup: ProcessSetup,
    *,
    adapters: AdapterSettings | None,
) -> Application:
    from headrace.gateway.conversations.setup import StateSetup
    from headrace.gateway.deployment import GatewayServer, ModelDeployments

    given = pd.ingress_deployment_config or {}
    tied = bool(section.gateway.resources)
    options = {
        "name": "gateway",
        "max_ongoing_requests": 10_000,
        "ray_actor_options": {"num_cpus": 0, "resources": section.gateway.resources},
        # A new gateway listens before the old one stops: it needs no room of its own. Where several
        # are tied to nodes by a resource that they fill, one is replaced at a time.
        "max_surge_percent": 0 if tied and section.gateway.replicas > 1 else 100,
        **drain_options(section.drain_s),
        **given,
    }
    if "autoscaling_config" not in given:
        options.setdefault("num_replicas", section.gateway.replicas)
    return (
        serve.deployment(serve.ingress()(GatewayServer))
        .options(**options)
        .bind(
            [
                ModelDeployments(
                    *(pd.decode_config.model_id, decode, prefill, section.router.to_settings()),
                    adapters=adapters,
                    starts_on_demand=_may_be_zero(pd.prefill_config)
                    and _may_be_zero(pd.decode_config),
                )
            ],
            store,
            section.gateway,
            setup,
            StateSetup(
                section.gateway.conversations,
                section.store.node.get("secret"),
                section.store.object_options,
            ),
        )
    )


def _direct(pd: PDServingArgs, bind: dict[str, Any], drain_s: float) -> Application:
    if os.environ.get("RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING") != "1":
        raise ValueError(
            "headrace.token_path: direct needs RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1 and "
            "RAY_SERVE_ENABLE_HA_PROXY=1 in the environment of every Ray process"
        )
    decode = build_direct_streaming_deployment(
        pd.decode_config,
        bind_kwargs=bind,
        override_serve_options=_options(pd.decode_config, "decode", drain_s, routed=False),
        deployment_cls=DPDecodeServer if _is_grouped(pd.decode_config) else DecodeServer,
    )
    return with_ingress_request_router(
        decode, build_ingress_request_router(server=decode, llm_config=pd.decode_config)
    )


def _classic(pd: PDServingArgs, decode: Application) -> Application:
    ingress = pd.ingress_cls_config
    model_id, lora = pd.decode_config.model_id, pd.decode_config.lora_config
    options = maybe_apply_llm_deployment_config_defaults(
        ingress.ingress_cls.get_deployment_options([pd.decode_config]),
        pd.ingress_deployment_config,
    )
    return serve.deployment(
        make_fastapi_ingress(ingress.ingress_cls), **{"name": "gateway", **options}
    ).bind(
        llm_deployments={model_id: decode},
        model_cards={model_id: to_model_metadata(model_id, pd.decode_config)},
        lora_paths={model_id: lora.dynamic_lora_loading_path} if lora is not None else {},
        **ingress.ingress_extra_kwargs,
    )
