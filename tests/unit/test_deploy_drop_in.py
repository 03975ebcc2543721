"""Arguments of Ray's app that would have no effect are refused by name when the app is built."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.serve.config import AutoscalingConfig

from headrace.app import build_app, build_configured
from headrace.config import ConfigError
from headrace.config.autoscaling import POLICY
from headrace.deploy.drop_in import refusals
from headrace_decode.http.vllm_environment import refuse_api_key
from headrace_engine.adapters.settings import AdapterSettings
from headrace_engine.ray.llm import PDServingArgs
from headrace_kvstore.protocol.address import base_url

ROLE: dict[str, Any] = {
    "model_loading_config": {"model_id": "m", "model_source": "/m"},
    "accelerator_config": {"kind": "cpu"},
    "engine_kwargs": {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's builders ask for the job's runtime environment, and would start a cluster for it."""
    context = SimpleNamespace(runtime_env={})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


def args(**changes: Any) -> dict[str, Any]:
    """Arguments of Ray's app; a change is `decode__deployment_config={...}` or a top-level one."""
    made: dict[str, Any] = {f"{r}_config": copy.deepcopy(ROLE) for r in ("prefill", "decode")}
    for name, value in changes.items():
        role, _, field = name.partition("__")
        if field:
            made[f"{role}_config"][field] = value
        else:
            made[name] = value
    return made


def refused(**changes: Any) -> list[str]:
    return refusals(PDServingArgs.model_validate(args(**changes)))


def test_plain_arguments_are_taken() -> None:
    assert refused() == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ingress_cls_config": {"ingress_extra_kwargs": {"a": 1}}}, "ingress_cls_config"),
        (
            {"decode__deployment_config": {"max_queued_requests": 5}},
            "decode_config.deployment_config.max_queued_requests",
        ),
        (
            {"decode__deployment_config": {"request_router_config": {}}},
            "decode_config.deployment_config.request_router_config",
        ),
        (
            {"decode__runtime_env": {"env_vars": {"VLLM_API_KEY": "k"}}},
            "decode_config.runtime_env.env_vars.VLLM_API_KEY",
        ),
    ],
)
def test_what_would_have_no_effect_beside_a_gateway_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    [line] = refused(**changes)
    assert line.startswith(named) and "\n" not in line


NONE: dict[str, Any] = {"autoscaling_config": {"min_replicas": 0, "max_replicas": 2}}


def test_prefill_that_nothing_would_start_again_is_refused() -> None:
    [line] = refused(prefill__deployment_config=NONE)
    assert line.startswith("prefill_config.deployment_config.autoscaling_config.min_replicas")
    assert refused(decode__deployment_config=NONE) == []
    ours = {
        "autoscaling_config": {**NONE["autoscaling_config"], "policy": {"policy_function": POLICY}}
    }
    assert refused(prefill__deployment_config=ours) == []


def test_gateways_that_nobody_could_reach_are_refused() -> None:
    both = PDServingArgs.model_validate(args(ingress_deployment_config=NONE))
    [line] = refusals(both)
    assert line.startswith("ingress_deployment_config.autoscaling_config.min_replicas")
    assert refusals(both, own_port=False) == []
    config = AutoscalingConfig(min_replicas=0, max_replicas=2)
    as_object = args(ingress_deployment_config={"autoscaling_config": config})
    assert refusals(PDServingArgs.model_validate(as_object)) == [line]


def test_every_refusal_is_in_one_error() -> None:
    both = args(
        ingress_cls_config={"ingress_extra_kwargs": {"a": 1}},
        decode__deployment_config={"max_queued_requests": 5},
    )
    with pytest.raises(ValueError, match=r"ingress_cls_config.*; and .*max_queued_requests"):
        build_app(both)


def test_a_key_of_vllms_own_is_refused_where_a_gateway_checks_keys() -> None:
    with pytest.raises(ValueError, match=r"VLLM_API_KEY.*gateway\.api_keys"):
        refuse_api_key({"VLLM_API_KEY": "secret"})
    refuse_api_key({"VLLM_API_KEY": ""})


def test_a_url_has_brackets_around_an_ipv6_address() -> None:
    assert base_url("10.0.0.1", 80) == "http://10.0.0.1:80"
    assert base_url("fd00::1", 80) == "http://[fd00::1]:80"


def deployment(app: Any, name: str) -> Any:
    """A deployment of a built app."""
    found, todo, seen = None, [app], set()
    while todo:
        each = todo.pop()
        if isinstance(each, list):
            todo += [part for model in each for part in (model.decode, model.prefill)]
        if id(each) in seen or not hasattr(each, "_bound_deployment"):
            continue
        seen.add(id(each))
        bound = each._bound_deployment
        if bound.name == name:
            found = bound
        todo += [*bound.init_args, *bound.init_kwargs.values()]
    assert found is not None, name
    return found


STORE_OFF = {"store": {"enabled": False}}


class TestSeveralModels:
    """The arguments `models`."""

    def entry(self, model_id: str, **section: Any) -> dict[str, Any]:
        both = args()
        configs = {name: both[name] for name in ("prefill_config", "decode_config")}
        for config in configs.values():
            config["model_loading_config"] = {"model_id": model_id, "model_source": "/m"}
        return {**configs, **({"headrace": section} if section else {})}

    def test_each_model_has_deployments_of_its_own_and_one_gateway_and_store(self) -> None:
        models = {"a": self.entry("org/a"), "b": self.entry("b", router={"policy": "local"})}
        app = build_app({"models": models, "headrace": {"router": {"itl_target_s": 0.5}}})
        first, second = deployment(app, "gateway").init_args[0]
        assert [(one.model_id, one.group) for one in (first, second)] == [
            ("org/a", "a"),
            ("b", "b"),
        ]
        assert (first.router.policy, second.router.policy) == ("cost", "local")
        assert first.router.itl_target_s == second.router.itl_target_s == 0.5
        stores, roles = set(), {}
        for role in ("decode", "prefill"):
            for key in "ab":
                made = deployment(app, f"{role}-{key}")
                router = made._deployment_config.request_router_config
                roles[made.name] = router.request_router_kwargs["role"]
                stores.add(id(made.init_kwargs["store"]))
        assert roles == {name: name for name in ("decode-a", "decode-b", "prefill-a", "prefill-b")}
        assert len(stores) == 1
        wiring = deployment(app, "decode-b").init_kwargs["wiring"]
        assert wiring.group == "b"
        assert deployment(app, "decode-b").init_kwargs["prefill_server"] is second.prefill

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"prefill_config": {}}, "prefill_config: has no effect beside models"),
            ({"models": {}}, "models: must be a mapping with 1 to 64"),
            ({"models": {"A b": {}}}, "models.A b: must have lower-case"),
            ({"models": {"a": {"decode": 1}}}, "models.a: may have prefill_config"),
            ({"headrace": {"gateway": {"aliases": {"x": "c"}}}}, "gateway.aliases.x: there is no"),
            ({"headrace": {"gateway": {"default_model": "c"}}}, "gateway.default_model: there is"),
        ],
    )
    def test_what_cannot_work_is_refused_by_name(self, change: dict[str, Any], told: str) -> None:
        models = {"a": self.entry("one"), "b": self.entry("two")}
        with pytest.raises(ValueError, match=told):
            build_app({"models": models, **change})

    def test_each_model_has_adapters_of_its_own(self) -> None:
        def with_adapter(model_id: str, name: str) -> dict[str, Any]:
            entry = self.entry(model_id)
            modules = [{"name": name, "path": f"/{name}"}]
            entry["decode_config"]["engine_kwargs"]["lora_modules"] = modules
            return entry

        models = {"a": with_adapter("org/a", "sql"), "b": with_adapter("b", "fr")}
        app = build_app({"models": {**models, "c": self.entry("c")}})
        given = [one.adapters for one in deployment(app, "gateway").init_args[0]]
        assert given == [
            AdapterSettings("org/a", {"sql": "/sql"}, group="a"),
            AdapterSettings("b", {"fr": "/fr"}, group="b"),
            None,
        ]
        for key, settings in zip("abc", given, strict=True):
            assert deployment(app, f"decode-{key}").init_kwargs["wiring"].adapters == settings
            assert deployment(app, f"prefill-{key}").init_kwargs["adapters"] == settings
        models["b"] = with_adapter("b", "sql")
        with pytest.raises(ValueError, match=r"models.b.model.adapters.sql: is an adapter of"):
            build_app({"models": models})
        models["b"] = with_adapter("b", "b")
        with pytest.raises(ValueError, match=r"models.b.decode_config.engine_kwargs.lora_modules"):
            build_app({"models": models})

    def test_a_model_whose_roles_may_both_be_zero_starts_on_demand(self) -> None:
        scaling = {"autoscaling": {"min_replicas": 0, "max_replicas": 2}}
        asleep = {"model": {"source": "/m"}, "prefill": scaling, "decode": scaling}
        awake = {"model": {"source": "/m"}, "decode": scaling}
        app = build_configured({"models": {"a": awake, "b": asleep}, **STORE_OFF})
        models = deployment(app, "gateway").init_args[0]
        assert [one.starts_on_demand for one in models] == [False, True]

    def test_two_models_with_one_name_are_refused(self) -> None:
        models = {"a": self.entry("one"), "b": self.entry("one")}
        with pytest.raises(ValueError, match=r"models.b.model.id: is .one., as models.a"):
            build_app({"models": models})

    def test_an_argument_without_effect_is_named_with_its_model(self) -> None:
        wrong = self.entry("two")
        wrong["decode_config"]["deployment_config"] = {"max_queued_requests": 5}
        with pytest.raises(ValueError, match=r"models\.b\.decode_config\.deployment_config"):
            build_app({"models": {"a": self.entry("one"), "b": wrong}})


def test_gateways_scale_by_the_ingress_options() -> None:
    scaling = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 10}
    app = build_app(
        args(headrace=STORE_OFF, ingress_deployment_config={"autoscaling_config": scaling})
    )
    config = deployment(app, "gateway")._deployment_config
    assert config.autoscaling_config.max_replicas == 3
    fixed = build_app(args(headrace=STORE_OFF, ingress_deployment_config={"num_replicas": 2}))
    assert deployment(fixed, "gateway").num_replicas == 2
    own = build_app(args(headrace={**STORE_OFF, "gateway": {"replicas": 4}}))
    assert deployment(own, "gateway").num_replicas == 4


@pytest.mark.parametrize(
    ("prefill", "decode", "on_demand"),
    [(None, None, False), (0, None, False), (None, 0, False), (0, 1, False), (0, 0, True)],
)
def test_gateways_take_requests_without_replicas_if_both_roles_may_be_zero(
    prefill: int | None, decode: int | None, on_demand: bool
) -> None:
    document: dict[str, Any] = {"model": {"id": "m", "source": "/m"}, **STORE_OFF}
    for role, least in (("prefill", prefill), ("decode", decode)):
        if least is not None:
            document[role] = {"autoscaling": {"min_replicas": least, "max_replicas": 3}}
    [model] = deployment(build_configured(document), "gateway").init_args[0]
    assert model.starts_on_demand is on_demand


@pytest.mark.parametrize(
    ("gateway", "surge"),
    [
        ({"replicas": 2}, 100),
        ({"replicas": 1, "resources": {"headrace_gateway": 1}}, 100),
        ({"replicas": 4, "resources": {"headrace_gateway": 1}}, 0),
    ],
    ids=["free", "one on a node", "two on each node"],
)
def test_gateways_that_fill_their_nodes_are_replaced_one_at_a_time(
    gateway: dict[str, Any], surge: int
) -> None:
    app = build_app(args(headrace={**STORE_OFF, "gateway": gateway}))
    assert deployment(app, "gateway")._deployment_config.max_surge_percent == surge


def test_a_whole_configuration_builds_the_app_that_up_would() -> None:
    document = {
        "model": {"id": "m", "source": "/m"},
        "gateway": {
            "host": "0.0.0.0",
            "port": 8088,
            "replicas": 2,
            "resources": {"gateways": 1},
            "api_keys_file": "/only/where/gateways/run",
        },
        "decode": {"replicas": 3, "resources": {"decoders": 1}},
        "store": {"enabled": False},
    }
    app = build_configured(document)
    gateway, decode = deployment(app, "gateway"), deployment(app, "decode")
    assert (gateway.num_replicas, decode.num_replicas) == (2, 3)
    assert gateway.ray_actor_options["resources"] == {"gateways": 1}


def test_a_wrong_configuration_is_refused_with_a_line_a_problem() -> None:
    with pytest.raises(ConfigError, match=r"decode\.replicas: must be >= 1, got 0"):
        build_configured({"decode": {"replicas": 0}})


def test_every_deployment_drains_as_long_as_configured_unless_its_own_config_says_otherwise() -> (
    None
):
    own = {"graceful_shutdown_timeout_s": 7.0}
    app = build_app(args(headrace={**STORE_OFF, "drain_s": 50}, prefill__deployment_config=own))
    for name, seconds in (("gateway", 61.0), ("decode", 61.0), ("prefill", 7.0)):
        config = deployment(app, name)._deployment_config
        assert config.graceful_shutdown_timeout_s == seconds, name


def test_a_request_router_that_the_user_chose_for_prefill_stays() -> None:
    chosen = {"request_routing_stats_period_s": 3.0}
    app = build_app(
        args(headrace=STORE_OFF, prefill__deployment_config={"request_router_config": chosen})
    )
    config = deployment(app, "prefill")._deployment_config.request_router_config
    assert config.request_routing_stats_period_s == 3.0
    named = deployment(app, "decode")._deployment_config.request_router_config
    assert "NamedReplicaRouter" in str(named.request_router_class)


def test_the_same_arguments_make_the_same_app() -> None:
    """No secret of a build is in it: versions of an app serve side by side during a redeploy."""
    first, second = (
        deployment(build_app(args(headrace=STORE_OFF)), "decode").init_kwargs["wiring"]
        for _ in range(2)
    )
    assert first == second
