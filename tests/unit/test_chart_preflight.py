"""The preflight of a pod: its command, its memory, and that a sound pod passes it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.doctor.pod import Pod
from headrace.config.load import validate
from headrace.model.room import MODEL_ROOM
from tests.support.chart import CHART, PRESETS, merged, objects, pods, preset, variables
from tests.support.chart_objects import app_of, of_kind
from tests.support.served import tiny_values

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = preset("laptop")


def test_every_pod_is_checked_before_it_starts() -> None:
    for role, template in pods(LAPTOP).items():
        [check] = template["spec"]["initContainers"]
        assert check["command"][:5] == ["headrace", "doctor", "--cluster", "--role", role]
        assert check["command"][-1] == "/etc/headrace/config/headrace.yaml"
    [document] = [one["data"]["headrace.yaml"] for one in of_kind(objects(LAPTOP), "ConfigMap")]
    assert yaml.safe_load(document) == app_of(objects(LAPTOP))


@pytest.mark.parametrize("name", PRESETS)
def test_pods_of_the_presets_have_the_memory_that_the_preflight_asks_for(name: str) -> None:
    values = preset(name)
    config = validate(app_of(objects(values)), files_here=False)
    units = {"Mi": 2**20, "Gi": 2**30}
    for role, template in pods(values).items():
        limit = template["spec"]["containers"][0]["resources"]["limits"]["memory"]
        plan = Pod(role, config)  # type: ignore[arg-type]
        assert int(limit[:-2]) * units[limit[-2:]] >= plan.memory_bytes, role


def test_the_preflight_knows_the_limit_of_the_models_volume() -> None:
    """A claim and a folder have the room of their disk."""

    def limits(values: dict[str, Any]) -> dict[str, str | None]:
        checks = {role: each["spec"]["initContainers"][-1] for role, each in pods(values).items()}
        return {role: variables(check).get(MODEL_ROOM) for role, check in checks.items()}

    assert limits(merged(LAPTOP, {"modelCache.size": "140Gi"})) == {
        **dict.fromkeys(("head", "gateway")),
        **dict.fromkeys(("prefill", "decode"), str(140 * 2**30)),
    }
    assert set(limits(preset("gpu-node")).values()) == {None}


@pytest.mark.parametrize("role", ["gateway", "decode"])
def test_the_preflight_of_a_pod_lets_a_sound_one_start(role: str, tmp_path: Path) -> None:
    """The init container's own command, environment and configuration, on this machine."""
    values = tiny_values()
    [check] = pods(values)[role]["spec"]["initContainers"]
    [told] = of_kind(objects(values), "ConfigMap")
    (file := tmp_path / "headrace.yaml").write_text(told["data"]["headrace.yaml"])
    env = {each["name"]: each["value"] for each in check["env"] if "value" in each}
    env = {**os.environ, **env, "HOME": str(tmp_path), "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "headrace.cli", *check["command"][1:-1], str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


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
