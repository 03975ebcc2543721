"""Each set of values renders to objects that Kubernetes, KubeRay, Ray and Serve take."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ray.serve.schema import ServeDeploySchema

from headrace.config.load import validate
from tests.support import chart_rules
from tests.support.chart import merged, objects, pods, preset, ray_service, serve_config
from tests.support.chart_objects import groups, of_kind, ray_service_schema, validate_built_in
from tests.support.chart_sets import CASES, SETS
from tests.support.tools import missing

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = preset("laptop")
CONTAINERS = ("ray-head", "ray-worker", "preflight", "model", "chat")
"""Those of the chart; others are of `podTemplate`."""


def closed(node: Any) -> Any:
    """A schema of a custom resource in which fields that it does not name are wrong."""
    if isinstance(node, dict):
        made = {key: closed(value) for key, value in node.items()}
        if "properties" in made and "additionalProperties" not in made:
            made["additionalProperties"] = bool(made.get("x-kubernetes-preserve-unknown-fields"))
        return made
    return [closed(each) for each in node] if isinstance(node, list) else node


@pytest.fixture(scope="module")
def kuberay() -> jsonschema.Draft202012Validator:
    """KubeRay 1.7.0's schema of a RayService (Apache-2.0), without its descriptions."""
    return jsonschema.Draft202012Validator(closed(ray_service_schema()))


@CASES
def test_built_in_kinds_are_valid_and_have_no_unknown_fields(values: dict[str, Any]) -> None:
    validate_built_in(objects(values))


def test_custom_resources_of_others_are_valid() -> None:
    """By the schemas of `@kubernetes-models`, which `make test` installs."""
    folder = ROOT / "build" / "node"
    if shutil.which("node") is None or not (folder / ".installed").exists():
        missing("node, or @kubernetes-models", "install Node.js, then: make test")
    kinds = ("PodMonitor", "PrometheusRule", "HTTPRoute")
    found = [one for kind in kinds for one in of_kind(objects(SETS["everything"]), kind)]
    broken = merged(found[0], {"spec.podMetricsEndpoints": 7})
    done = subprocess.run(
        ["node", "custom_resources.mjs"],
        cwd=folder,
        input=json.dumps([*found, broken]),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    [wrong] = json.loads(done.stdout)
    assert wrong.startswith("PodMonitor: ") and "podMetricsEndpoints" in wrong


@CASES
def test_the_ray_service_is_one_of_kuberays(
    values: dict[str, Any], kuberay: jsonschema.Draft202012Validator
) -> None:
    wrong = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        for error in kuberay.iter_errors(ray_service(values))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "path", ["spec", "spec.rayClusterConfig", "spec.rayClusterConfig.headGroupSpec.template.spec"]
)
def test_a_field_that_kuberay_does_not_know_is_found(
    kuberay: jsonschema.Draft202012Validator, path: str
) -> None:
    assert not kuberay.is_valid(merged(ray_service(LAPTOP), {f"{path}.invented": 1}))


@CASES
def test_the_ray_service_keeps_the_rules_that_only_kuberays_code_has(
    values: dict[str, Any],
) -> None:
    """`ray-operator/controllers/ray/utils/validation.go` of KubeRay 1.7.0."""
    service = ray_service(values, name="a" * 53)
    spec, cluster = service["spec"], service["spec"]["rayClusterConfig"]
    assert len(service["metadata"]["name"]) <= 47
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", service["metadata"]["name"])
    assert spec["rayClusterDeletionDelaySeconds"] >= 0
    strategy = spec["upgradeStrategy"]
    if strategy["type"] == "NewClusterWithIncrementalUpgrade":
        options = strategy["clusterUpgradeOptions"]
        assert cluster["enableInTreeAutoscaling"] is True
        assert 0 < options["stepSizePercent"] <= options["maxSurgePercent"] <= 100
        assert options["intervalSeconds"] > 0 and options["gatewayClassName"]
        # `rayservice_controller.go`: the new cluster begins with `minReplicas`, and follows
        # Serve's target_capacity from there.
        least = {each["groupName"]: each["minReplicas"] for each in cluster["workerGroupSpecs"]}
        assert least.pop("gateway") > 0 and not any(least.values())
        assert "target_capacity" not in serve_config(values), "KubeRay sets it"
        assert "serveService" not in spec, "it would be left out"
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert "serve" in [port["name"] for port in head["ports"]], "for KubeRay's Service"
    assert "name" not in cluster["headGroupSpec"].get("headService", {}).get("metadata", {})
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "for authOptions"
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        taken = {"num-cpus", "num-gpus", "memory", "resources", "labels", "redis-password"}
        assert not taken & group["rayStartParams"].keys(), "beside `resources`"
        assert group["template"]["spec"]["containers"]
        assert "restartPolicy" not in group["template"]["spec"], "for the autoscaler"
    for group in cluster["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert not {"tlsOptions", "networkPolicy", "historyServerOptions"} & cluster.keys(), "alpha"


@CASES
def test_serve_takes_the_configuration_and_so_does_headrace(values: dict[str, Any]) -> None:
    config = serve_config(values)
    schema = ServeDeploySchema.model_validate(config)
    [app] = schema.applications
    assert app.import_path == "headrace.app:build_configured"
    checked = validate(app.args, files_here=False)
    assert checked.gateway.port != schema.http_options.port
    strategy = ray_service(values)["spec"]["upgradeStrategy"]["type"]
    in_steps = strategy == "NewClusterWithIncrementalUpgrade"
    sections: dict[str, Any] = {"gateway": checked.gateway}
    for model, one in checked.served_models().items():
        for role, settings in one.roles().items():
            sections[f"{role}-{model}" if model else role] = settings
    found = groups(objects(values))
    assert found.keys() == {"head", *sections}
    for name, section in sections.items():
        group, first, ranks = found[name], section.replicas, 1
        if name == "gateway" and first > 1:
            first //= 2  # two fill a pod, so that Ray leaves none without
            assert float(group["resources"]["headrace_gateway"]) == 2
        if name != "gateway":
            ranks = section.engine.get("data_parallel_size", 1)
            if section.autoscaling is not None:
                first = section.autoscaling.within(first)
                least = 0 if in_steps else section.bounds[0]
                assert (group["minReplicas"], group["maxReplicas"]) == (least, section.bounds[1])
        assert group["replicas"] == first * ranks
        [resource] = section.resources
        assert resource in group["resources"], "replicas fit their pods"


@CASES
def test_no_container_is_root_or_writes_its_own_file_system(values: dict[str, Any]) -> None:
    specs = [template["spec"] for template in pods(values).values()]
    specs += [job["spec"]["template"]["spec"] for job in of_kind(objects(values), "Job")]
    specs += [pod["spec"] for pod in of_kind(objects(values), "Pod")]
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        chosen = values.get("podSecurity", {}).get("userId", 1000)
        assert spec["securityContext"].get("runAsUser") == chosen
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        containers = [*spec.get("initContainers", []), *spec["containers"]]
        for container in [each for each in containers if each["name"] in CONTAINERS]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"]["drop"] == ["ALL"]
            assert set(rights["capabilities"].get("add", [])) <= {"IPC_LOCK"}
            mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
            home = {each["name"]: each.get("value") for each in container["env"]}["HOME"]
            assert {"/tmp", home} <= mounted
            if container["name"] not in ("model", "chat"):
                assert {"/cache", "/dev/shm"} <= mounted


@CASES
def test_no_rule_of_kubernetes_kuberay_or_ray_is_broken(values: dict[str, Any]) -> None:
    """Rules that no schema states."""
    assert chart_rules.faults(objects(values)) == []
