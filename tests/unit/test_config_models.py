"""Several models in one configuration: their defaults, their checks, and the app's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config import ConfigError, load_config, to_app_args
from headrace.config.load import validate


def config(**data: Any) -> Any:
    return validate(data, files_here=False)


def problems(**data: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        config(**data)
    return caught.value.problems


def test_a_model_has_the_top_levels_values_where_it_sets_none() -> None:
    made = config(
        model={"id": "ignored", "source": "/ignored", "max_model_len": 512},
        decode={"kv_cache_gb": 2, "engine": {"max_num_seqs": 4}},
        models={
            "small": None,
            "large": {
                "model": {"id": "org/large", "source": "/large"},
                "decode": {"replicas": 3, "engine": {"max_num_batched_tokens": 256}},
            },
        },
    )
    small, large = made.served_models().values()
    assert (small.model.id, small.model.source, small.model.max_model_len) == ("small", None, 512)
    assert (large.model.id, large.model.source) == ("org/large", "/large")
    assert (small.decode.replicas, small.decode.kv_cache_gb) == (1, 2)
    assert (large.decode.replicas, large.decode.kv_cache_gb) == (3, 2)
    assert large.decode.engine == {"max_num_seqs": 4, "max_num_batched_tokens": 256}
    assert not small.models and small.gateway == made.gateway


def test_without_models_the_top_level_is_the_only_one() -> None:
    made = config()
    assert made.served_models() == {"": made}
    assert set(to_app_args(made)) == {"prefill_config", "decode_config", "headrace"}


def test_a_configuration_that_was_written_out_reads_the_same() -> None:
    made = config(models={"a": {"decode": {"replicas": 2}}, "b": None}, decode={"threads": 2})
    assert validate(made.model_dump(), files_here=False) == made


def test_overrides_reach_one_model_or_all(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {a: {model: {source: org/a}}, b: {model: {source: org/b}}}")
    change = ["models.b.decode.threads=3", "prefill.threads=2"]
    small, large = load_config(file, overrides=change).served_models().values()
    assert (small.decode.threads, large.decode.threads) == (1, 3)
    assert (small.prefill.threads, large.prefill.threads) == (2, 2)


def test_files_count_from_the_configurations_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    model = "model: {source: org/a}, techniques: {sparse: {calibration: b.json}}"
    file.write_text(f"models: {{a: {{{model}}}}}")
    [made] = load_config(file).served_models().values()
    assert made.techniques.sparse.calibration == str(tmp_path / "b.json")


def test_the_reserved_cpus_are_those_of_all_models() -> None:
    made = config(models={"a": {"decode": {"cpus": 2, "replicas": 3}}, "b": {}})
    assert made.cpus_booked() == 0.5 + 6 + 0.5 + 0.5
    found = problems(models={"a": {}, "b": {}}, ray={"num_cpus": 1})
    assert found == (
        "ray.num_cpus: is 1, but the replicas reserve 2 CPUs (replicas x cpus of both roles); set "
        "at least that, or null",
    )


def test_each_model_scales_by_itself() -> None:
    args = to_app_args(
        config(models={"a": {"decode": {"autoscaling": {"max_replicas": 4}}}, "b": None})
    )
    scaling = args["models"]["a"]["decode_config"]["deployment_config"]["autoscaling_config"]
    assert scaling["policy"]["policy_kwargs"]["model"] == "a"
    assert scaling["max_replicas"] == 4
    assert args["models"]["b"]["decode_config"]["deployment_config"]["num_replicas"] == 1
    assert set(args["models"]["a"]["headrace"]) == {"router", "speculation", "techniques"}


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"decode": {"replicas": 0}}, "models.a.decode.replicas: must be >= 1, got 0"),
        ({"decode": {"replica": 2}}, "models.a.decode.replica: unknown field; did you mean"),
        ({"gateway": {}}, "models.a.gateway: unknown field"),
        ({"decode": 5}, "models.a.decode: must be a section with fields, got 5"),
        (5, "models.a: must be a section with fields, got 5"),
        (
            {"decode": {"gpus": 2}},
            "models.a.decode.gpus: is 2, but engine.tensor_parallel_size is 1",
        ),
        ({"prefill": {"engine": {"dtype": "half"}}}, "models.a.decode.engine.dtype: is not set"),
        ({"router": {"placement": "cots"}}, "models.a.router.placement: must be one of"),
        ({"decode": {"env": {"OMP_NUM_THREADS": 1}}}, "models.a.decode.env.OMP_NUM_THREADS: set"),
    ],
)
def test_a_models_mistake_is_told_with_its_path(entry: Any, told: str) -> None:
    found = problems(models={"a": entry, "b": None})
    assert found[0].startswith(told)


def test_a_mistake_of_the_top_level_is_told_once() -> None:
    found = problems(models={"a": None, "b": None}, decode={"replicas": 0})
    assert found == ("decode.replicas: must be >= 1, got 0",)


def test_a_name_that_cannot_name_deployments_is_refused() -> None:
    [found] = problems(models={"Big_one": None})
    assert found.startswith("models.Big_one: is no name that can be given here")


@pytest.mark.parametrize(
    ("gateway", "told"),
    [
        ({"aliases": {"a": "b"}}, "gateway.aliases.a: is the name of a model; choose another"),
        ({"aliases": {"x": "c"}}, 'gateway.aliases.x: there is no model "c"'),
        ({"aliases": {"x": {"a": 0}}}, "gateway.aliases.x.a: must be > 0, got 0"),
        ({"aliases": {"x": {}}}, "gateway.aliases.x: must not be empty"),
        ({"default_model": "c"}, 'gateway.default_model: there is no model or alias "c"'),
    ],
)
def test_names_that_mean_nothing_are_refused(gateway: dict[str, Any], told: str) -> None:
    found = problems(models={"a": None, "b": None}, gateway=gateway)
    assert found[0].startswith(told)


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (["b"], [], "models.a.model.adapters.b: is the name of a model (models.b)"),
        (["a"], [], "models.a.model.adapters.a: 'a' is the model's own name"),
        (["chat"], [], "models.a.model.adapters.chat: is an alias, too (gateway.aliases.chat)"),
        (["sql"], ["sql"], "models.b.model.adapters.sql: is an adapter of models.a, too"),
    ],
)
def test_an_adapter_has_a_name_of_its_own(a: list[str], b: list[str], told: str) -> None:
    models = {
        key: {"model": {"adapters": {name: f"/{name}" for name in names}}}
        for key, names in {"a": a, "b": b}.items()
    }
    found = problems(models=models, gateway={"aliases": {"chat": "b"}})
    assert found[0].startswith(told)


def test_an_alias_is_no_adapter_of_the_only_model_either() -> None:
    gateway = {"aliases": {"sql": "smollm2-135m-instruct"}}
    [found] = problems(model={"adapters": {"sql": "/sql"}}, gateway=gateway)
    assert found.startswith("model.adapters.sql: is an alias, too (gateway.aliases.sql)")


def test_each_model_has_adapters_of_its_own() -> None:
    models = {"a": {"model": {"adapters": {"sql": "/sql"}}}, "b": None}
    args = to_app_args(config(models=models))["models"]
    assert args["a"]["decode_config"]["engine_kwargs"]["lora_modules"][0]["name"] == "sql"
    assert "enable_lora" not in args["b"]["decode_config"]["engine_kwargs"]


def test_the_default_may_be_an_alias_of_several_models() -> None:
    gateway = {"aliases": {"chat": {"a": 95, "b": 5}, "gpt": "a"}, "default_model": "chat"}
    made = config(models={"a": None, "b": None}, gateway=gateway)
    assert made.gateway.aliases == {"chat": {"a": 95, "b": 5}, "gpt": {"a": 1}}


def test_two_models_need_two_names() -> None:
    both = {"a": {"model": {"id": "m"}}, "b": {"model": {"id": "m"}}}
    [found] = problems(models=both)
    assert found.startswith('models.b.model.id: is "m", as models.a.model.id is')


def test_one_model_can_have_aliases_too() -> None:
    found = problems(gateway={"aliases": {"gpt": "smollm2-135m-instuct"}})
    assert 'did you mean "smollm2-135m-instruct"?' in found[0]
    config(gateway={"aliases": {"gpt": "smollm2-135m-instruct"}})
