"""Faults that the chart had, found by reading it against KubeRay's code and by sending it to a real
API server, and public complaints about other charts that held for it: each has tests.
"""

from __future__ import annotations

import ast
import json
import re
from functools import lru_cache
from pathlib import Path

import pytest

from tests.support.chart import CHART, merged, pods, preset

ROOT = Path(__file__).resolve().parents[2]
FAULTS = {
    "budgets hold up every drain": (
        "test_chart_clusters::test_a_budget_has_an_integer_that_lets_one_pod_go",
        "test_chart_rules::test_a_fault_is_found",
    ),
    "a first start that is too slow is final": (
        "test_chart_clusters::test_a_first_start_is_never_given_up_unless_asked",
    ),
    "a corrected upgrade fails, as a Job cannot be changed": (
        "test_chart_clusters::test_a_changed_download_is_another_job",
        "test_chart_upgrades::test_a_changed_job_under_its_old_name_is_refused",
        "test_chart_upgrades::test_an_edit_takes_effect_and_can_be_rolled_back",
    ),
    "the download has neither the pods' variables nor their place": (
        "test_chart_clusters::test_the_download_runs_as_a_prefill_pod_would_and_stays",
    ),
    "a folder is downloaded": ("test_chart_clusters::test_a_folder_is_not_downloaded",),
    "engine pods are ready before they have a model": (
        "test_chart_clusters::test_an_engine_pod_is_ready_by_its_engine",
        "test_ready_file::test_the_probe_of_the_chart_goes_by_the_files_age",
    ),
    "an engine spreads over two pods, or fits into none": (
        "test_chart_clusters::test_an_engine_that_does_not_fit_into_a_pod_is_refused_by_name",
        "test_config_app_args::test_each_gpu_of_a_tensor_parallel_engine_gets_a_bundle",
    ),
    "data-parallel ranks without pods": (
        "test_chart_clusters::test_a_data_parallel_role_has_a_pod_for_each_rank",
    ),
    "a variable that the chart also sets is refused": (
        "test_chart_pods::test_a_variable_of_ones_own_wins",
        "test_chart::test_no_rule_of_kubernetes_kuberay_or_ray_is_broken",
    ),
    "a pod that ends cuts streams after 30 s": (
        "test_chart_clusters::test_a_pod_that_ends_leaves_its_requests_the_drain",
    ),
    "the network policy breaks what other values promise": (
        "test_chart_clusters::test_the_network_policy_allows_what_other_values_name",
    ),
    "secrets in plain text": (
        "test_chart_clusters::test_values_that_cannot_work_are_refused",
        "test_chart_pods::test_a_pod_template_is_merged_as_kubernetes_would",
    ),
    "MIG and claims of devices are not scaled": (
        "test_chart_pods::test_rays_autoscaler_knows_the_gpus_of_an_engine_pod",
    ),
    "a toleration of one's own removes the GPU's": (
        "test_chart_pods::test_engines_tolerate_the_taint_of_their_nodes_and_ones_own",
    ),
    "OpenShift cannot choose the user": ("test_chart_pods::test_the_cluster_may_choose_the_user",),
    "init containers with GPUs": (
        "test_chart_review::test_without_the_preflight_no_init_container_has_a_gpu",
    ),
    "the doctor names values that do not exist": (
        "test_chart_review::test_values_that_the_doctor_names_exist",
    ),
    "scaled to zero, gateways leave the Service": (
        "test_gateway_documents::test_a_gateway_without_replicas_takes_the_request_that_starts_one",
    ),
    "long names collide": (
        "test_chart_clusters::test_long_names_that_differ_stay_different",
        "test_chart_rules::test_releases_of_one_namespace_do_not_meet",
    ),
    "alerts of one release fire for another": (
        "test_chart_monitoring::test_the_alerts_of_a_release_look_at_its_own_pods",
    ),
    "a changed model's name serves the default model": (
        "test_chart_clusters::test_values_that_cannot_work_are_refused",
    ),
    "numbers are refused where people write them": (
        "test_chart_pods::test_numbers_and_booleans_are_taken_where_kubernetes_wants_text",
        "test_chart_pods::test_cpus_memory_and_tags_may_be_numbers",
    ),
    "/dev/shm has one size for any number of GPUs": (
        "test_chart_clusters::test_a_tensor_parallel_engine_has_the_gpus_and_queues_of_one_pod",
    ),
    "the Service's port does not say that it speaks TLS": (
        "test_chart_pods::test_the_services_port_says_what_it_speaks",
    ),
    "IPv6 only": ("test_chart_clusters::test_pods_with_ipv6_only_are_reached",),
    "Redis has no user, and is not cleaned": (
        "test_chart_clusters::"
        "test_redis_gets_its_user_and_namespace_and_can_be_cleaned_after_an_uninstall",
    ),
    "the chart's test wants a Secret of a fixed name": (
        "test_chart_clusters::test_the_test_asks_with_a_key_of_the_secret_that_is_named",
    ),
}
COMPLAINTS = {
    "kuberay#2662": "budgets hold up every drain",
    "kuberay#4138": "a first start that is too slow is final",
    "helm#7725": "a corrected upgrade fails, as a Job cannot be changed",
    "kserve#4987": "the download has neither the pods' variables nor their place",
    "argo-cd#8586": "the download has neither the pods' variables nor their place",
    "exo#1800": "the download has neither the pods' variables nor their place",
    "production-stack#61": "the doctor names values that do not exist",
    "vllm#37982": "/dev/shm has one size for any number of GPUs",
    "llm-d-batch-gateway#282": "OpenShift cannot choose the user",
    "kubernetes-nmstate#1570": "the network policy breaks what other values promise",
    "LLMKube#972": "IPv6 only",
    "kuberay#1349": "init containers with GPUs",
    "kuberay#5004": "a pod that ends cuts streams after 30 s",
    "kuberay#3527": "MIG and claims of devices are not scaled",
    "kuberay#4366": "data-parallel ranks without pods",
}
"""What the downloads of kserve, Argo CD and exo lacked is in one test."""


@lru_cache(maxsize=64)
def functions_of(module: str) -> set[str]:
    """Names of the functions in a module of this folder."""
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text("utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


@pytest.mark.parametrize("tests", FAULTS.values(), ids=FAULTS.keys())
def test_each_fault_has_its_tests(tests: tuple[str, ...]) -> None:
    for name in tests:
        module, _, test = name.partition("::")
        assert test in functions_of(module), name


def test_each_complaint_is_about_one_of_the_faults() -> None:
    assert set(COMPLAINTS.values()) <= set(FAULTS)


def test_without_the_preflight_no_init_container_has_a_gpu() -> None:
    """GKE Autopilot refuses pods whose init containers ask for GPUs."""
    cluster = preset("gpu-cluster")
    asking = {
        enabled: [
            container["name"]
            for template in pods(merged(cluster, {"preflight.enabled": enabled})).values()
            for container in template["spec"].get("initContainers", [])
            if any("gpu" in key for key in container["resources"]["limits"])
        ]
        for enabled in (True, False)
    }
    assert asking == {True: ["preflight", "preflight"], False: []}


def test_values_that_the_doctor_names_exist() -> None:
    """Its remedies are for users of the chart, too."""
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    text = "".join(
        path.read_text("utf-8") for path in (ROOT / "platform/headrace/cli/doctor").glob("*.py")
    )
    named = set(re.findall(r"in the chart: ([\w.]+)", text)) | set(
        re.findall(r"`((?:decode|prefill|gateway|head)\.podTemplate[\w.]*)`", text)
    )
    assert named
    group = schema["$defs"]["Engines"]["properties"]
    for path in named:
        first, *_ = [part for part in path.split(".") if part not in ("ROLE", "decode", "prefill")]
        assert first in group or first in schema["properties"], path
