"""`config.models`: each role of each model has a group of pods of its own."""

from __future__ import annotations

from typing import Any

from headrace.config.load import validate
from headrace.model.room import MODEL_ROOM
from tests.support.chart import merged, objects, preset
from tests.support.chart_objects import Object, app_of, groups, of_kind
from tests.support.chart_sets import SETS

VALUES = SETS["several models"]


def test_each_role_of_each_model_has_pods_of_its_own() -> None:
    found = groups(objects(VALUES))
    small, large = found["decode-small"], found["prefill-large-x"]
    assert [small[f"{name}eplicas"] for name in ("r", "minR", "maxR")] == [2, 1, 4]
    assert large["resources"] == {"headrace_prefill_large-x": "1"}
    assert large["replicas"] == 3
    labels = small["template"]["metadata"]["labels"]
    assert (labels["headrace/role"], labels["headrace/model"]) == ("decode", "small")


def test_replicas_run_in_the_pods_of_their_model() -> None:
    models = validate(app_of(objects(VALUES)), files_here=False).served_models()
    assert models.keys() == {"large-x", "small"}
    for key, model in models.items():
        for role, settings in model.roles().items():
            assert settings.resources == {f"headrace_{role}_{key}": 1.0}


def test_a_pod_checks_the_settings_of_its_model() -> None:
    pod = groups(objects(VALUES))["prefill-large-x"]["template"]["spec"]
    [preflight] = pod["initContainers"]
    assert preflight["command"][3:7] == ["--role", "prefill", "--model", "large-x"]


def test_a_group_of_several_pods_has_a_budget_of_its_own() -> None:
    budgets = of_kind(objects(VALUES), "PodDisruptionBudget")
    [one] = [each for each in budgets if "prefill" in each["metadata"]["name"]]
    assert one["metadata"]["name"].endswith("-prefill-large-x")
    assert one["spec"]["minAvailable"] == 2
    labels = one["spec"]["selector"]["matchLabels"]
    assert (labels["headrace/role"], labels["headrace/model"]) == ("prefill", "large-x")


def test_the_pods_of_all_models_follow_the_values_of_their_role() -> None:
    values = merged(VALUES, {"decode.podTemplate": {"spec": {"priorityClassName": "high"}}})
    found = groups(objects(values))

    def pod(name: str) -> Object:
        return dict(found[name]["template"]["spec"])

    high = {name for name in found if "priorityClassName" in pod(name)}
    assert high == {"decode-small", "decode-large-x"}
    for name in found.keys() - {"head", "gateway"}:
        assert "readinessProbe" in pod(name)["containers"][0]


def test_the_gpus_and_ranks_of_a_model_are_those_of_its_pods() -> None:
    gpus: dict[str, Any] = {
        "gpus": 2,
        "engine": {"tensor_parallel_size": 2, "data_parallel_size": 3},
    }
    models = {"a": {"prefill": gpus, "decode": gpus}, "b": {}}
    cluster = preset("gpu-cluster")
    values = merged(cluster, {"config.models": models, "modelCache.warmUp": False})
    found = groups(objects(values))
    a = found["decode-a"]
    assert a["resources"] == {"headrace_decode_a": "2", "GPU": "2"}
    assert a["replicas"] == 3 * found["decode-b"]["replicas"]
    limits = a["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "2"


def test_a_model_in_an_oci_image_is_a_folder_of_its_engine_pods() -> None:
    """Behind `#` is a folder of the image."""
    for values, wanted in (
        (
            SETS["several models in OCI images"],
            {
                "a": ("registry.corp/a:1", "/weights"),
                "b": ("registry.corp/b@sha256:0", "/weights/models/b"),
            },
        ),
        (SETS["a model in an OCI image"], {"": ("registry.corp:5000/qwen:1", "/weights")}),
    ):
        models = validate(app_of(objects(values)), files_here=False).served_models()
        for name, group in groups(objects(values)).items():
            spec = group["template"]["spec"]
            found = [volume["image"] for volume in spec["volumes"] if "image" in volume]
            role, _, model = name.partition("-")
            if role not in ("prefill", "decode") or model not in wanted:
                assert found == [], name
                continue
            image, folder = wanted[model]
            assert found == [{"reference": image, "pullPolicy": "IfNotPresent"}]
            assert models[model].model.source == folder
            for container in (spec["containers"][0], spec["initContainers"][-1]):
                mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
                assert mounts["weights"] == "/weights"


def test_a_model_in_a_bucket_is_copied_before_the_preflight() -> None:
    """By the image itself, with the engine's variables and identity, and without its devices."""
    values = SETS["a model in a bucket"]
    model = validate(app_of(objects(values)), files_here=False).model
    for name, group in groups(objects(values)).items():
        spec = group["template"]["spec"]
        names = [each["name"] for each in spec["initContainers"]]
        if name not in ("prefill", "decode"):
            assert names == ["preflight"]
            continue
        assert names == ["model", "preflight"]
        copy, engine = spec["initContainers"][0], spec["containers"][0]
        assert copy["command"][:4] == ["headrace", "model", "copy", "s3://models/qwen/"]
        assert [copy["command"][4]] == [model.source]
        assert model.source is not None and model.source.startswith("/models/qwen-")
        assert (copy["env"], copy["image"]) == (engine["env"], engine["image"])
        small = merged(values, {"modelCache": {"type": "ephemeral", "size": "1Gi"}})
        limited = groups(objects(small))[name]["template"]["spec"]["initContainers"][0]
        assert {"name": MODEL_ROOM, "value": str(2**30)} in limited["env"]
        assert copy["resources"]["limits"].keys() == {"cpu", "memory"}
        assert "/models" in {mount["mountPath"] for mount in copy["volumeMounts"]}


def test_a_model_in_a_bucket_can_be_copied_by_the_job_and_two_buckets_have_two_folders() -> None:
    values = SETS["models in buckets of other clouds, one copied before"]
    [job] = of_kind(objects(values), "Job")
    [container] = job["spec"]["template"]["spec"]["containers"]
    models = validate(app_of(objects(values)), files_here=False).served_models()
    source = models["a"].model.source
    assert container["command"] == ["headrace", "model", "copy", "gs://models/a", source]
    folders = {
        app_of(objects(merged(VALUES, {"config.models.small.model": {"source": url}})))["models"][
            "small"
        ]["model"]["source"]
        for url in ("s3://a/qwen", "s3://b/qwen", "az://a/qwen")
    }
    assert len(folders) == 3
