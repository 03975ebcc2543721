"""The Dockerfiles: linted, whole against the repository, and kept to what Kubernetes asks of them.

No container engine is needed. The last test carries a Dockerfile's steps out (minutes, root, a
base file system): HEADRACE_IMAGE_BASE names the base, docs/images.md says how it is made.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("cpu", "gpu")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "images" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


rehearse, contents = load("rehearse"), load("contents")


def instructions(name: str) -> list[tuple[str, str]]:
    text = (ROOT / "images" / f"{name}.Dockerfile").read_text("utf-8")
    return [(s.name, s.text) for s in rehearse.steps(text)]


def last_stage(name: str) -> list[tuple[str, str]]:
    found = instructions(name)
    begin = max(i for i, (kind, _) in enumerate(found) if kind == "FROM")
    return found[begin:]


@pytest.mark.parametrize("name", NAMES)
def test_hadolint_finds_nothing(name: str) -> None:
    program = Path(sys.executable).parent / "hadolint"
    if not program.exists():
        pytest.skip("hadolint is missing: make install")
    file = ROOT / "images" / f"{name}.Dockerfile"
    done = subprocess.run([program, file], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", NAMES)
def test_every_file_that_is_copied_exists_and_reaches_the_builder(name: str) -> None:
    copied = 0
    for kind, text in instructions(name):
        if kind != "COPY" or "--from=" in text:
            continue
        for source in text.split()[:-1]:
            assert rehearse.context_files(source), f"COPY {source}: no such file, or ignored"
            copied += 1
    assert copied >= 10


@pytest.mark.parametrize("name", NAMES)
def test_every_file_that_a_step_names_was_copied(name: str) -> None:
    """The repository's files in RUN steps of the first stage."""
    copied: set[str] = set()
    named = 0
    for kind, text in instructions(name):
        if kind == "COPY" and "--from=" not in text:
            copied |= {
                str(f) for source in text.split()[:-1] for f in rehearse.context_files(source)
            }
        for file in (
            re.findall(r"(?:scripts|requirements|images)/[\w./-]+\w", text) if kind == "RUN" else []
        ):
            assert file in copied, f"RUN uses {file}"
            named += 1
    assert named >= 3


def test_the_installer_takes_the_options_that_the_images_use() -> None:
    installer = (ROOT / "scripts" / "install.py").read_text("utf-8")
    for name in NAMES:
        run = next(t for k, t in instructions(name) if k == "RUN" and "scripts/install.py" in t)
        for option in re.findall(r"--[a-z-]+", run.split("install.py", 1)[1]):
            assert f'"{option}"' in installer


def test_nothing_else_reaches_the_builder() -> None:
    rules = rehearse.rules()
    hidden = [".git/config", ".venv/bin/python", "build/x", "tests/unit/test_images.py", "key.pem"]
    hidden += [
        "platform/headrace/__pycache__/app.pyc",
        "keys.yaml",
        "requirements/cpu-overrides.txt",
    ]
    assert [f for f in hidden if not rehearse.ignored(f, rules)] == []
    shown = ["platform/headrace/app.py", "requirements/gpu.lock", "pyproject.toml"]
    shown += ["platform/headrace/presets/laptop.yaml", "platform/headrace/py.typed"]
    assert [f for f in shown if rehearse.ignored(f, rules)] == []


def test_what_setuptools_needs_is_there() -> None:
    """pyproject.toml's own files and package folders are copied."""
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    where = re.search(r"where = \[(.*?)\]", pyproject)
    assert where is not None
    wanted = {w.strip(' "') for w in where.group(1).split(",")} | {"README.md", "LICENSE"}
    for name in NAMES:
        copied = {w for k, t in instructions(name) if k == "COPY" for w in t.split()[:-1]}
        assert wanted <= copied


@pytest.mark.parametrize("name", NAMES)
def test_the_container_is_no_root_and_writes_to_volumes_only(name: str) -> None:
    stage = dict(last_stage(name))  # the last of each kind
    user, group = stage["USER"].split(":")
    assert user.isdigit() and group.isdigit() and int(user) > 0  # runAsNonRoot wants a number
    volumes = json.loads(stage["VOLUME"])
    env = rehearse.Stage(Path("/"))
    rehearsal = rehearse.Rehearsal(Path("/"), Path("/"), {}, [])
    rehearsal.stage = env
    rehearsal._env(stage["ENV"])
    from headrace.cli.probes import needed_folders

    places = {k: str(v) for k, v in needed_folders(env.env).items()}
    folders = {k: v for k, v in env.env.items() if v.startswith("/") and k != "PATH"}
    for variable, place in (places | folders).items():
        assert any(place == v or place.startswith(v + "/") for v in volumes), variable
    assert env.env["USER"]


@pytest.mark.parametrize("name", NAMES)
def test_bases_are_pinned_and_one_base_serves_both_stages(name: str) -> None:
    found = instructions(name)
    base = next(text for kind, text in found if kind == "ARG" and text.startswith("BASE="))
    assert re.search(r":\d+\.\d+\.\d+-[a-z-]+$", base), base
    assert [t.split()[0] for k, t in found if k == "FROM"] == ["${BASE}", "${BASE}"]
    labels = next(t for k, t in found if k == "LABEL")
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels


def test_kuberays_login_shell_finds_ray() -> None:
    """KubeRay runs `bash -lc`, and Debian's /etc/profile sets PATH anew."""
    for name in NAMES:
        assert any("/etc/profile.d/" in t for k, t in last_stage(name) if k == "RUN")


def test_contents_compares_with_the_lock() -> None:
    lock = contents.locked(
        "# comment\nA_b==1.0\n    # via x\nc==2 ; python_version < '3'\nd==3+cpu  # why\n"
    )
    assert lock == {"a-b": "1.0", "d": "3+cpu"}
    assert contents.differences(lock, {"a-b": "1.0", "d": "3+cpu", "headrace": "0.1.0"}) == []
    assert contents.differences(lock, {"a-b": "1.1", "pip": "25"}) == [
        "a-b: the lock says 1.0, installed is 1.1",
        "d: the lock says 3+cpu, installed is nothing",
        "pip: the lock says nothing, installed is 25",
    ]


def test_steps_are_read_as_builders_read_them() -> None:
    text = "# syntax=x\nFROM a AS b\nRUN one \\\n    # in between\n    && two\n\nUSER 1\n"
    assert [(s.name, s.text, s.line) for s in rehearse.steps(text)] == [
        ("FROM", "a AS b", 2),
        ("RUN", "one      && two", 3),
        ("USER", "1", 7),
    ]


@pytest.mark.soak
def test_the_cpu_images_steps_can_be_carried_out(tmp_path: Path) -> None:
    base = os.environ.get("HEADRACE_IMAGE_BASE")
    if base is None or os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and HEADRACE_IMAGE_BASE (docs/images.md)")
    words = [sys.executable, "images/rehearse.py", "images/cpu.Dockerfile", "--base", base]
    words += ["--out", str(tmp_path), "--then", "headrace version && ! touch /opt/x"]
    for variable, option in (("SECRET", "--secret"), ("BIND", "--bind")):
        if value := os.environ.get(f"HEADRACE_IMAGE_{variable}"):
            words += [option, value]
    done = subprocess.run(words, cwd=ROOT, timeout=1200)
    assert done.returncode == 0
