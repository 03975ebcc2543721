"""What the Helm chart deploys: every object is one that Kubernetes, KubeRay and Serve take."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import helm_python as helm
import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from headrace.cli.doctor.pod import Pod
from headrace.config.load import validate
from scripts.generate.chart import files
from tests.support import chart_rules
from tests.support.chart import (
    CHART,
    GROUPS,
    PRESETS,
    REVIEWED,
    SNAPSHOTS,
    merged,
    objects,
    of_kind,
    pods,
    preset,
    ray_service,
    rendered,
    serve_config,
    snapshot,
)
from tests.support.served import tiny_values
from tests.support.tools import missing

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
LAPTOP = preset("laptop")
CLUSTER = preset("gpu-cluster")
KUBERNETES = "1.34"
EVERYTHING = {
    "monitoring.podMonitor": True,
    "monitoring.prometheusRule": True,
    "monitoring.dashboards": True,
    "ingress.enabled": True,
    "ingress.host": "llm.example.com",
    "ingress.tlsSecret": "llm-tls",
    "httpRoute.enabled": True,
    "httpRoute.parentRefs": [{"name": "public"}],
    "networkPolicy.clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    "tls.existingSecret": "headrace-tls",
    "gcsFaultTolerance.redisAddress": "redis:6379",
    "gcsFaultTolerance.passwordSecret": "redis",
    "modelCache.tokenSecret": "hub",
    "image.pullSecrets": ["registry"],
    "service.type": "LoadBalancer",
    "decode.nodeSelector": {"gpu": "h100"},
    "decode.resources": {"hugepages-2Mi": "2Gi", "rdma/ib": 1},
    "commonLabels": {"team": "search"},
    "rayService.labels": {"kueue.x-k8s.io/queue-name": "llm"},
    "serviceAccount.annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/llm"},
    "service.spec": {
        "loadBalancerClass": "service.k8s.aws/nlb",
        "ipFamilyPolicy": "PreferDualStack",
    },
    "extraObjects": [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more", "labels": {}}}
    ],
    "prefill.podTemplate": {
        "metadata": {"annotations": {"karpenter.sh/do-not-disrupt": True}},
        "spec": {
            "runtimeClassName": "nvidia",
            "schedulerName": "volcano",
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "96Gi"}}],
        },
    },
}
MATRIX: dict[str, dict[str, Any]] = {
    **{name: preset(name) for name in PRESETS},
    "everything": merged(CLUSTER, EVERYTHING),
    "ephemeral disk": merged(LAPTOP, {"disk.type": "ephemeral", "disk.storageClassName": "fast"}),
    "claimed disk": merged(LAPTOP, {"disk.type": "claim", "disk.claimName": "kv"}),
    "claimed models": merged(
        LAPTOP,
        {"modelCache": {"type": "claim", "claimName": "models", "warmUp": True}},
    ),
    "claims of devices": merged(
        CLUSTER,
        {"decode.resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h100"}]},
    ),
    "upgrades in steps": merged(
        CLUSTER,
        {"upgrade.type": "NewClusterWithIncrementalUpgrade", "upgrade.gatewayClassName": "istio"},
    ),
    "keys in the values": merged(
        LAPTOP, {"apiKeys.file": "keys: []\n", "config.gateway.insecure": False}
    ),
    "replicas follow the load": merged(
        LAPTOP,
        {
            "config.prefill.autoscaling": {"min_replicas": 0, "max_replicas": 4},
            "config.decode.autoscaling": {"min_replicas": 2, "max_replicas": 8},
        },
    ),
    "a user that the cluster chooses": merged(LAPTOP, {"podSecurity.userId": None}),
    "only IPv6": merged(LAPTOP, {"ipv6Only": True}),
    "data parallel": merged(
        CLUSTER, {"config.decode.engine.data_parallel_size": 4, "config.decode.replicas": 2}
    ),
    "no policies": merged(LAPTOP, {"networkPolicy.enabled": False, "preflight.enabled": False}),
}
CASES = pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX.keys())


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
    schema = json.loads((DATA / "rayservice_v1.json").read_text("utf-8"))
    return jsonschema.Draft202012Validator(closed(schema))


def test_the_generated_files_are_current() -> None:
    """`python -m scripts.generate` writes them."""
    for name, text in files().items():
        assert (CHART / name).read_text("utf-8") == text, name


def test_helm_finds_nothing_to_complain_of() -> None:
    found = helm.lint(str(CHART), values=LAPTOP)
    wrong = [one for one in found["messages"] if one["error"] != "icon is recommended"]
    assert (wrong, found["errors"]) == ([], [])


@CASES
def test_built_in_kinds_are_valid_and_have_no_unknown_fields(values: dict[str, Any]) -> None:
    own = ("RayService", "PodMonitor", "PrometheusRule", "HTTPRoute")
    for one in objects(values):
        if one["kind"] not in own:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
    for role, template in pods(values).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role}, **template}
        pod["metadata"] = {"name": role, **template["metadata"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_custom_resources_of_others_are_valid() -> None:
    """By the schemas of `@kubernetes-models`, which `make test` installs."""
    folder = ROOT / "build" / "node"
    if shutil.which("node") is None or not (folder / ".installed").exists():
        missing("node, or @kubernetes-models", "install Node.js, then: make test")
    kinds = ("PodMonitor", "PrometheusRule", "HTTPRoute")
    found = [one for kind in kinds for one in of_kind(kind, MATRIX["everything"])]
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
        assert least["prefill"] == least["decode"] == 0 < least["gateway"]
        assert "target_capacity" not in serve_config(values), "KubeRay sets it"
        assert "serveService" not in spec, "it would be left out"
    head = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert "serve" in [port["name"] for port in head["ports"]], "for KubeRay's Service"
    assert "name" not in cluster["headGroupSpec"].get("headService", {}).get("metadata", {})
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "for authOptions"
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
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
    for role in GROUPS:
        group = next(
            each
            for each in ray_service(values)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
            if each["groupName"] == role
        )
        section = getattr(checked, role)
        first = section.replicas
        if role in checked.roles() and (scaling := section.autoscaling) is not None:
            first = scaling.within(first)
            least = 0 if in_steps else section.bounds[0]
            assert (group["minReplicas"], group["maxReplicas"]) == (least, section.bounds[1])
        if role == "gateway" and first > 1:
            first //= 2  # two fill a pod, so that Ray leaves none without
            assert float(group["resources"]["headrace_gateway"]) == 2
        ranks = (
            values.get("config", {}).get(role, {}).get("engine", {}).get("data_parallel_size", 1)
        )
        assert group["replicas"] == first * ranks
        [name] = section.resources
        assert name in group["resources"], "replicas fit their pods"


@CASES
def test_no_container_is_root_or_writes_its_own_file_system(values: dict[str, Any]) -> None:
    specs = [template["spec"] for template in pods(values).values()]
    specs += [job["spec"]["template"]["spec"] for job in of_kind("Job", values)]
    specs += [pod["spec"] for pod in of_kind("Pod", values)]
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        chosen = values.get("podSecurity", {}).get("userId", 1000)
        assert spec["securityContext"].get("runAsUser") == chosen
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"]["drop"] == ["ALL"]
            assert set(rights["capabilities"].get("add", [])) <= {"IPC_LOCK"}
            mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
            home = {each["name"]: each.get("value") for each in container["env"]}["HOME"]
            assert {"/tmp", home} <= mounted
            if container["name"] not in ("model", "chat", "own"):
                assert {"/cache", "/dev/shm"} <= mounted


@CASES
def test_no_rule_of_kubernetes_kuberay_or_ray_is_broken(values: dict[str, Any]) -> None:
    """Rules that no schema states."""
    assert chart_rules.faults(objects(values)) == []


def test_engines_get_their_devices_memory_and_rights() -> None:
    engine = pods(MATRIX["everything"])["decode"]["spec"]
    [container] = engine["containers"]
    limits = container["resources"]["limits"]
    assert container["resources"]["requests"] == limits
    assert (limits["nvidia.com/gpu"], limits["rdma/ib"], limits["hugepages-2Mi"]) == (
        *("1", "1", "2Gi"),
    )
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    volumes = {volume["name"]: volume for volume in engine["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{65 * 1024}Mi"}
    assert volumes["kv"]["hostPath"]["path"] == "/var/lib/headrace"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert (mounts["kv"], mounts["shm"], mounts["models"]) == ("/kv", "/dev/shm", "/models")
    assert engine["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert "keys" not in volumes and "tls" not in volumes, "only gateways read these"


def test_engine_pods_of_one_node_share_its_folder_in_which_the_store_gives_each_a_slot() -> None:
    """What they do with it: `test_kv_slots`."""
    folders = set()
    for role in ("prefill", "decode"):
        spec = pods(CLUSTER)[role]["spec"]
        [volume] = [each for each in spec["volumes"] if each["name"] == "kv"]
        [mount] = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "kv"]
        folders.add((volume["hostPath"]["path"], mount["mountPath"]))
    [(_, mounted)] = folders
    [app] = serve_config(CLUSTER)["applications"]
    assert app["args"]["store"]["nvme_folder"] == mounted


def test_rays_autoscaler_reaches_the_api_and_gets_no_rights() -> None:
    """KubeRay adds it to the head's pod. Most clusters' API listens on 6443 behind port 443."""
    values = MATRIX["replicas follow the load"]
    options = ray_service(values)["spec"]["rayClusterConfig"]["autoscalerOptions"]
    rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert options == {"securityContext": rights}
    [policy, _] = of_kind("NetworkPolicy", values)
    rules = policy["spec"]["egress"]
    assert 6443 in {port["port"] for rule in rules for port in rule.get("ports", [])}


def test_claims_of_devices_replace_the_resource_key() -> None:
    spec = pods(MATRIX["claims of devices"])["decode"]["spec"]
    [container] = spec["containers"]
    assert container["resources"]["claims"] == [{"name": "gpu"}]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_the_service_leads_to_the_gateways_that_answer() -> None:
    values = MATRIX["everything"]
    [service] = of_kind("Service", values)
    gateway = pods(values)["gateway"]
    assert service["spec"]["selector"].items() <= gateway["metadata"]["labels"].items()
    [container] = gateway["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    [wanted] = service["spec"]["ports"]
    config = serve_config(values)["applications"][0]["args"]["gateway"]
    assert ports[wanted["targetPort"]] == config["port"]
    assert container["readinessProbe"]["httpGet"] == {
        "path": "/health",
        "port": "http",
        "scheme": "HTTPS",
    }
    others = set(ports.values()) - {config["port"]}
    assert config["port"] not in others


def test_every_pod_is_checked_before_it_starts() -> None:
    for role, template in pods(LAPTOP).items():
        [check] = template["spec"]["initContainers"]
        assert check["command"][:5] == ["headrace", "doctor", "--cluster", "--role", role]
        assert check["command"][-1] == "/etc/headrace/config/headrace.yaml"
    [document] = [one["data"]["headrace.yaml"] for one in of_kind("ConfigMap", LAPTOP)]
    assert yaml.safe_load(document) == serve_config(LAPTOP)["applications"][0]["args"]


@pytest.mark.parametrize("name", PRESETS)
def test_pods_of_the_presets_have_the_memory_that_the_preflight_asks_for(name: str) -> None:
    values = preset(name)
    config = validate(serve_config(values)["applications"][0]["args"], files_here=False)
    units = {"Mi": 2**20, "Gi": 2**30}
    for role, template in pods(values).items():
        limit = template["spec"]["containers"][0]["resources"]["limits"]["memory"]
        plan = Pod(role, config)  # type: ignore[arg-type]
        assert int(limit[:-2]) * units[limit[-2:]] >= plan.memory_bytes, role


@pytest.mark.parametrize("role", ["gateway", "decode"])
def test_the_preflight_of_a_pod_lets_a_sound_one_start(role: str, tmp_path: Path) -> None:
    """The init container's own command, environment and configuration, on this machine."""
    values = tiny_values()
    [check] = pods(values)[role]["spec"]["initContainers"]
    [told] = of_kind("ConfigMap", values)
    (file := tmp_path / "headrace.yaml").write_text(told["data"]["headrace.yaml"])
    env = {each["name"]: each["value"] for each in check["env"] if "value" in each}
    env = {**os.environ, **env, "HOME": str(tmp_path), "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "headrace.cli", *check["command"][1:-1], str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_release_is_far_below_the_size_that_kubernetes_takes() -> None:
    whole = sum(map(len, rendered(MATRIX["everything"]).values()))
    chart = sum(path.stat().st_size for path in CHART.rglob("*") if path.is_file())
    assert whole + chart < 700_000


@pytest.mark.parametrize("name", REVIEWED)
def test_a_preset_renders_what_was_reviewed(name: str) -> None:
    reviewed = (SNAPSHOTS / f"{name}.txt").read_text("utf-8")
    assert snapshot(name) == reviewed, "if it is meant: python -m tests.support.chart"


@pytest.mark.parametrize("values", [LAPTOP, CLUSTER], ids=["laptop", "gpu-cluster"])
def test_rendering_twice_gives_the_same(values: dict[str, Any]) -> None:
    """Argo CD compares: nothing random, nothing asked of a cluster."""
    with helm.Chart.load(str(CHART)) as chart:
        first, second = (chart.render(values, name="demo", namespace="prod") for _ in range(2))
    assert first == second
    for path in (CHART / "templates").rglob("*"):
        if path.is_file():
            text = path.read_text("utf-8")
            for word in ("lookup ", "randAlpha", "genCA", "genSelfSigned", "now "):
                assert word not in text, f"{path.name}: {word}"


class TestSeveralModels:
    """`config.models`."""

    def values(self) -> dict[str, Any]:
        models = {
            "small": {"decode": {"replicas": 2, "autoscaling": {"max_replicas": 4}}},
            "large-x": {"model": {"id": "org/large"}, "prefill": {"replicas": 3}},
        }
        return merged(preset("laptop"), {"config.models": models})

    def groups(self) -> dict[str, dict[str, Any]]:
        spec = ray_service(self.values())["spec"]["rayClusterConfig"]
        return {group["groupName"]: group for group in spec["workerGroupSpecs"]}

    def test_each_role_of_each_model_has_pods_of_its_own(self) -> None:
        groups = self.groups()
        roles = {f"{role}-{m}" for m in ("small", "large-x") for role in ("prefill", "decode")}
        assert set(groups) == {"gateway", *roles}
        small = groups["decode-small"]
        assert [small[f"{name}eplicas"] for name in ("r", "minR", "maxR")] == [2, 1, 4]
        assert groups["prefill-large-x"]["resources"] == {"headrace_prefill_large-x": "1"}
        assert groups["prefill-large-x"]["replicas"] == 3
        labels = small["template"]["metadata"]["labels"]
        assert (labels["headrace/role"], labels["headrace/model"]) == ("decode", "small")

    def test_replicas_run_in_the_pods_of_their_model(self) -> None:
        [app] = serve_config(self.values())["applications"]
        models = validate(app["args"], files_here=False).served_models()
        assert {
            f"{role}-{key}": settings.resources
            for key, model in models.items()
            for role, settings in model.roles().items()
        } == {
            f"{role}-{key}": {f"headrace_{role}_{key}": 1.0}
            for key in ("large-x", "small")
            for role in ("prefill", "decode")
        }

    def test_a_pod_checks_the_settings_of_its_model(self) -> None:
        pod = self.groups()["prefill-large-x"]["template"]["spec"]
        [preflight] = [each for each in pod["initContainers"] if each["name"] == "preflight"]
        assert preflight["command"][3:7] == ["--role", "prefill", "--model", "large-x"]

    def test_a_group_of_several_pods_has_a_budget_of_its_own(self) -> None:
        budgets = of_kind("PodDisruptionBudget", self.values())
        [one] = [each for each in budgets if "prefill" in each["metadata"]["name"]]
        assert one["metadata"]["name"].endswith("-prefill-large-x")
        assert one["spec"]["minAvailable"] == 2
        labels = one["spec"]["selector"]["matchLabels"]
        assert (labels["headrace/role"], labels["headrace/model"]) == ("prefill", "large-x")

    def test_the_pods_of_all_models_follow_the_values_of_their_role(self) -> None:
        template = {"spec": {"priorityClassName": "high"}}
        values = merged(self.values(), {"decode.podTemplate": template})
        spec = ray_service(values)["spec"]["rayClusterConfig"]
        for group in spec["workerGroupSpecs"]:
            pod = group["template"]["spec"]
            is_decode = group["groupName"].startswith("decode")
            assert ("priorityClassName" in pod) == is_decode
            has_probe = "readinessProbe" in pod["containers"][0]
            assert has_probe or group["groupName"] == "gateway"

    def test_the_gpus_and_ranks_of_a_model_are_those_of_its_pods(self) -> None:
        gpus = {"gpus": 2, "engine": {"tensor_parallel_size": 2, "data_parallel_size": 3}}
        models = {"a": {"prefill": gpus, "decode": gpus}, "b": {}}
        values = merged(CLUSTER, {"config.models": models, "modelCache.warmUp": False})
        spec = ray_service(values)["spec"]["rayClusterConfig"]
        groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
        a = groups["decode-a"]
        assert a["resources"] == {"headrace_decode_a": "2", "GPU": "2"}
        assert a["replicas"] == 3 * groups["decode-b"]["replicas"]
        limits = a["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == "2"

    @pytest.mark.parametrize(
        ("model", "told"),
        [
            ({"decode": {"engine": {"nnodes": 2}}}, "config.models.a.decode.engine.nnodes: must"),
            ({"decode": {"gpus": 2}}, "config.models.a.decode.gpus: is 2, but"),
            ({"model": {"source": "s3://b/m"}}, "config.models.a.model.source: must be a name"),
            (
                {"prefill": {"env": {"HF_TOKEN": "x"}}},
                "config.models.a.prefill.env.HF_TOKEN: would",
            ),
        ],
    )
    def test_what_cannot_work_is_told_with_the_model(
        self, model: dict[str, Any], told: str
    ) -> None:
        with pytest.raises(helm.HelmError, match=re.escape(told)):
            rendered(merged(LAPTOP, {"config.models": {"a": model, "b": {}}}))
