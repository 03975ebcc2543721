"""`build_app(args)`: the whole serving graph, in place of `ray.serve.llm:build_pd_openai_app`.

    client -> gateway -> decode replica's own port -> prefill, as planned per request

Both roles' engines share one KV store.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.deployment import Application
from ray.serve.llm import build_dp_deployment, build_llm_deployment

from headrace.config import AppSection, to_app_args
from headrace.config.integrity import IntegritySection
from headrace.config.load import validate
from headrace.deploy.app_models import AppModel, app_models
from headrace.deploy.blending import add_blending
from headrace.deploy.drop_in import may_be_none, refusals
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
from headrace.observability.usage import USAGE_EXPORTS
from headrace.replica.planner import RouterPlanner
from headrace.replica.prefill_fallback import PrefillFallback
from headrace_decode.llm.vllm_engine import PlannedVLLMEngine
from headrace_decode.server import DecodeServer, DPDecodeServer
from headrace_decode.wiring import DecodeWiring
from headrace_engine.kv_transfer.compatibility import CHECKS_KEY
from headrace_engine.ray.engine import LEFT_OUT_KEY
from headrace_engine.ray.llm import PDServingArgs
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
        `headrace.config.AppSection`. Several models are in `models` (`deploy.app_models`).

    Raises:
        pydantic.ValidationError: a field is unknown or its value impossible.
        ValueError: an argument would have no effect (`deploy.drop_in`).
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
    models = app_models(args, section)
    own_port = section.gateway.port is not None
    wrong = [
        line for model in models for line in refusals(model.pd, own_port=own_port, key=model.key)
    ]
    if wrong:
        raise ValueError("; and ".join(dict.fromkeys(wrong)))
    setup = ProcessSetup(**section.observability.model_dump())
    for model in models:
        if section.observability.otlp_endpoint:
            for config in (model.pd.prefill_config, model.pd.decode_config):
                _trace_engine(config, section.observability.otlp_endpoint)
        prefill, decode = model.engines
        prefill.update(shared(decode=decode, prefill=prefill))
        for engine in model.engines:
            _use_own_nixl(engine, section.integrity)
        _note_left_out(model, store=section.store.enabled)
    every = [engine for model in models for engine in model.engines]
    store = add_store(section.store, every, setup)
    deployed = [_deploy(model, section, store, setup) for model in models]
    return _relay(deployed, section, store, setup)


@dataclass(frozen=True)
class Deployed:
    """A model's deployments."""

    model: AppModel
    prefill: Application
    decode: Application


def _deploy(
    model: AppModel, section: AppSection, store: Application | None, setup: ProcessSetup
) -> Deployed:
    """Put a model's techniques into its engines' arguments, and deploy its roles."""
    pd, own, engines = model.pd, model.section, model.engines
    add_speculative_decoding(own.speculation, pd.decode_config.engine_kwargs)
    make_blending_planner = add_blending(own.techniques.blending, engines)
    add_sparse_attention(own.techniques, engines, engines[1:])
    prefill = _deployment(
        pd.prefill_config,
        model.deployment("prefill"),
        PrefillServer,
        DPPrefillServer,
        {
            "setup": setup,
            "store": store,
            "fallback": _prefill_fallback(pd),
            "adapters": model.adapters,
            "export_left_out": export_left_out,
            "usage": USAGE_EXPORTS,
        },
        section.drain_s,
    )
    wiring = DecodeWiring(
        make_planner=RouterPlanner(own.router.to_settings()),
        listen=_listen,
        setup=setup,
        adapters=model.adapters,
        tenants=tenants_of(own.speculation),
        drafting_metrics=RaySpeculationMetrics,
        export_left_out=export_left_out,
        usage=USAGE_EXPORTS,
        make_blending_planner=make_blending_planner,
        system_prompts=tuple(section.store.system_prompts) if store is not None else (),
        group=model.key,
    )
    decode = _deployment(
        pd.decode_config,
        model.deployment("decode"),
        DecodeServer,
        DPDecodeServer,
        {"prefill_server": prefill, "wiring": wiring, "store": store},
        section.drain_s,
    )
    return Deployed(model, prefill, decode)


def build_configured(args: dict[str, Any]) -> Application:
    """Build the app from a configuration, as `headrace up` does.

    `args` is the file of docs/configuration.md. Its section `ray` has no effect: the cluster runs
    already. The files that it names must be where gateways run.

    Raises:
        ConfigError: the configuration cannot be used; with a line for each problem.
    """
    return build_app(to_app_args(validate(args, files_here=False)))


def _note_left_out(model: AppModel, *, store: bool) -> None:
    """Tell a model's engines which configured parts their own arguments leave out."""
    drafts = model.section.speculation.enabled
    for config, speculation in ((model.pd.prefill_config, False), (model.pd.decode_config, drafts)):
        left_out = _left_out(config.engine_kwargs, store=store, speculation=speculation)
        if left_out:
            more = {LEFT_OUT_KEY: left_out}
            config.experimental_configs = {**config.experimental_configs, **more}


def _left_out(engine: dict[str, Any], *, store: bool, speculation: bool) -> dict[str, str]:
    """Return the configured parts that an engine's own arguments leave out, with the reasons.

    Args:
        engine: `engine_kwargs`.
        store: whether a KV store is configured.
        speculation: whether speculative decoding is configured for this role.
    """
    reasons = {
        "store": why_no_store(engine) if store else None,
        "speculation": why_no_speculation(engine) if speculation else None,
    }
    return {part: why for part, why in reasons.items() if why is not None}


def _prefill_fallback(pd: PDServingArgs) -> FallbackServing | None:
    """Return how prefill replicas answer in place of decode replicas; None where they cannot."""
    if _is_grouped(pd.prefill_config):
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
    name: str,
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
        override_serve_options=_options(config, name, drain_s),
        deployment_cls=data_parallel if grouped else plain,
    )


def _is_grouped(config: Any) -> bool:
    """Whether a replica is one rank of a data-parallel group."""
    return bool(config.engine_kwargs.get("data_parallel_size", 1) > 1)


def _options(config: Any, name: str, drain_s: float) -> dict[str, Any]:
    """Return a deployment's options, without those that the user has set."""
    options = {**drain_options(drain_s), "request_router_config": routed_as(name)}
    given = config.deployment_config
    return {"name": name} | {key: value for key, value in options.items() if key not in given}


def _relay(
    deployed: Sequence[Deployed],
    section: AppSection,
    store: Application | None,
    setup: ProcessSetup,
) -> Application:
    from headrace.gateway.conversations.setup import StateSetup
    from headrace.gateway.deployment import GatewayServer
    from headrace.gateway.serve_backend.model_backend import ModelDeployments

    given = deployed[0].model.pd.ingress_deployment_config or {}
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
                    each.model.model_id,
                    each.decode,
                    each.prefill,
                    each.model.section.router.to_settings(),
                    each.model.key,
                    each.model.adapters,
                    all(
                        may_be_none(role.deployment_config)
                        for role in (each.model.pd.prefill_config, each.model.pd.decode_config)
                    ),
                )
                for each in deployed
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
