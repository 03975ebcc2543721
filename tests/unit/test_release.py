"""A release: one version everywhere, and a wheel with all files of the packages and the chart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from headrace.chart_folder import chart_folder
from scripts.release import build, check_contents, digest, pack_chart, provenance, version

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).parent / "uv"
FIND = "from headrace.chart_folder import chart_folder; print(chart_folder())"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, which is beside it."""
    out = tmp_path_factory.mktemp("dist")
    return build(out, tmp_path_factory.mktemp("source"))


def test_package_chart_and_changelog_have_one_version() -> None:
    assert version() == "0.1.0"


def test_the_wheel_has_every_tracked_file_of_the_packages_and_the_chart(wheel: Path) -> None:
    check_contents(wheel)


@pytest.mark.parametrize("lost", ["headrace/console/static/app.js", "helm/headrace/Chart.yaml"])
def test_a_wheel_that_lacks_a_file_is_refused(wheel: Path, tmp_path: Path, lost: str) -> None:
    poorer = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(poorer, "w") as made:
        for name in whole.namelist():
            if not name.endswith(lost):
                made.writestr(name, b"")
    with pytest.raises(SystemExit, match=f"lacks 1 files: .*{lost}"):
        check_contents(poorer)


def test_an_installed_wheel_finds_its_chart(wheel: Path, tmp_path: Path) -> None:
    into = ["--target", tmp_path, "--no-deps", "--quiet", wheel]
    subprocess.run([UV, "pip", "install", "--python", sys.executable, *into], check=True)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", FIND], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert found.stderr == "" and found.stdout.strip().startswith(str(tmp_path))
    for file in ROOT.glob("helm/headrace/**/*.yaml"):
        same = Path(found.stdout.strip()) / file.relative_to(ROOT / "helm" / "headrace")
        assert same.read_bytes() == file.read_bytes()


def test_in_the_repository_the_chart_is_the_repositorys() -> None:
    assert chart_folder() == ROOT / "helm" / "headrace"


def test_the_packed_chart_has_one_folder_with_the_charts_name(tmp_path: Path) -> None:
    with tarfile.open(pack_chart(tmp_path, "9.9.9")) as archive:
        names = archive.getnames()
    assert "headrace/Chart.yaml" in names and "headrace/files/alerts.yaml" in names
    assert {name.split("/")[0] for name in names} == {"headrace"}


def test_the_provenance_names_the_commit_and_each_file_by_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "a.whl"
    file.write_bytes(b"wheel")
    told = json.loads(json.dumps(provenance([file], "2026-01-01T00:00:00Z")))
    assert told["subject"] == [{"name": "a.whl", "digest": {"sha256": digest(file)}}]
    source, *locks = told["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert len(source["digest"]["gitCommit"]) == 40
    assert [lock["name"] for lock in locks] == ["cpu.lock", "gpu.lock", "dev.lock"]
