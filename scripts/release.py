"""Build a release in dist/ and check it; `make release` runs this. Nothing is published.

dist/ then has the wheel, the sdist, the chart, the locks, a bill of materials for each lock, the
provenance (which commit and which tools made what) and SHA256SUMS.

`scripts/smoke.py` then installs the wheel in a new environment, and serves a model with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("cpu", "gpu")
PACKAGES = ("platform", "prefill", "decode", "engine", "kvstore", "lab")


def say(text: str) -> None:
    print(f"headrace release: {text}", flush=True)


def fail(text: str) -> NoReturn:
    """End with one line on stderr and status 1."""
    sys.exit(f"error: {text}")


def run(command: Sequence[str | Path], cwd: Path = ROOT) -> str:
    """Return what a command prints. Its failure ends the release, with the end of its output."""
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True)
    if done.returncode:
        words = " ".join(map(str, command))
        fail(f"`{words}` ended with {done.returncode}:\n{(done.stderr or done.stdout)[-3000:]}")
    return done.stdout


def version() -> str:
    """Return the version; pyproject.toml, the chart and the changelog must have the same.

    The changelog's newest section is either this version, or this version `(unreleased)`.
    """
    found = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    chart = (ROOT / "helm" / "headrace" / "Chart.yaml").read_text()
    for name in ("version", "appVersion"):
        told = re.search(rf'^{name}: "?([^"\n]+)"?$', chart, re.MULTILINE)
        if told is None or told[1] != found:
            fail(f"{name} of helm/headrace/Chart.yaml is {told and told[1]}, not {found}")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if newest is None or newest[1] != found:
        fail(f"the newest section of CHANGELOG.md is {newest and newest[1]}, not {found}")
    return found


def tracked(*folders: str) -> list[str]:
    """Return the files that git tracks below these folders."""
    return run(["git", "ls-files", "--", *folders]).splitlines()


def build(out: Path, source: Path) -> Path:
    """Build the sdist from a copy of the tracked files, and the wheel from it; return the wheel."""
    for name in tracked(*PACKAGES, "helm", "pyproject.toml", "README.md", "LICENSE"):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    uv = Path(sys.executable).parent / "uv"
    command: list[str | Path] = [uv, "build", "--quiet", "--no-build-isolation"]
    run([*command, "--python", sys.executable, "-o", out, source], source)
    [wheel] = out.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Fail if the wheel lacks a file of the packages or of the chart."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    names = {name.partition("/")[2] for name in tracked(*PACKAGES)}
    missing = sorted(name for name in names if name not in packed)
    data = {name.partition(".data/data/")[2] for name in packed if ".data/data/" in name}
    missing += sorted(name for name in tracked("helm") if f"share/headrace/{name}" not in data)
    if missing:
        fail(f"{wheel.name} lacks {len(missing)} files: {', '.join(missing[:5])}")


def pack_chart(out: Path, number: str) -> Path:
    """Write the chart as `helm package` does: a compressed tar file with one folder."""
    packed = out / f"headrace-chart-{number}.tgz"
    with tarfile.open(packed, "w:gz") as archive:
        for name in tracked("helm/headrace"):
            archive.add(ROOT / name, name.removeprefix("helm/"))
    return packed


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def provenance(files: Iterable[Path], began: str) -> dict[str, Any]:
    """Return an in-toto statement with SLSA's provenance (v1) of these files; it is not signed."""
    commit = run(["git", "rev-parse", "HEAD"]).strip()
    changed = bool(run(["git", "status", "--porcelain"]).strip())
    tools = {
        "python": sys.version.split()[0],
        "uv": run([Path(sys.executable).parent / "uv", "--version"]).split()[1],
        "setuptools": package_version("setuptools"),
    }
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": digest(path)}} for path in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:headrace:make-release:1",
                "externalParameters": {"target": "make release"},
                "internalParameters": {"uncommitted_changes": changed, **tools},
                "resolvedDependencies": [
                    {"name": "source", "digest": {"gitCommit": commit}},
                    *(
                        {
                            "name": f"{lock}.lock",
                            "digest": {"sha256": digest(ROOT / "requirements" / f"{lock}.lock")},
                        }
                        for lock in (*LOCKS, "dev")
                    ),
                ],
            },
            "runDetails": {
                "builder": {"id": "urn:headrace:make-release"},
                "metadata": {"startedOn": began, "finishedOn": now()},
            },
        },
    }


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a release in dist/ and check it.")
    parser.add_argument("--no-check", action="store_true", help="build only")
    options = parser.parse_args()
    out, began, number = ROOT / "dist", now(), version()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(out, Path(folder))
    check_contents(wheel)
    (out / ".gitignore").unlink(missing_ok=True)
    pack_chart(out, number)
    for lock in LOCKS:
        shutil.copy(ROOT / "requirements" / f"{lock}.lock", out / f"headrace-{number}-{lock}.lock")
        shutil.copy(ROOT / "build" / "sbom" / f"{lock}.cdx.json", out)
    (out / "provenance.json").write_text(
        json.dumps(provenance(sorted(out.iterdir()), began), indent=1) + "\n"
    )
    sums = [f"{digest(path)}  {path.name}\n" for path in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(sums))
    say(f"built in {out}: {', '.join(path.name for path in sorted(out.iterdir()))}")
    if not options.no_check:
        words = [ROOT / "scripts" / "smoke.py", wheel, ROOT / "requirements" / "cpu.lock"]
        if subprocess.call([sys.executable, *words]):
            fail("the wheel did not pass the smoke test")
    say("done; nothing was published")


if __name__ == "__main__":
    main()
