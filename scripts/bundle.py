"""Make an offline bundle: Headrace and the wheels of a lock, in pieces, for lack of a network.

    python scripts/bundle.py build/bundle --lock requirements/gpu.lock --python 3.12 --piece-mb 60

The folder then has `manifest.json` (sizes and SHA-256 of pieces and wheels), `piece-0000` and so
on, and `install.py`, which needs only Python. Wheels come from where pip looks. A package that has
no wheel there is built if the result runs on any machine.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundle_install import FORMAT, chunks, digest, fail  # type: ignore[import-not-found]
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
INSTALLER = Path(__file__).with_name("bundle_install.py")
MB = 10**6
GLIBC_FIRST = 5
"""Minor version of the oldest glibc that wheels are tagged with."""


@dataclass(frozen=True)
class Target:
    """Machine that the bundle is for.

    Attributes:
        python: its version, such as 3.12. machine: such as x86_64. glibc: such as 2.31.
    """

    python: str
    machine: str
    glibc: str

    def markers(self) -> dict[str, str]:
        """Return the environment of the lock's markers."""
        return {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }

    def pip_options(self) -> list[str]:
        """Return the options with which pip takes wheels for this machine."""
        options = ["--python-version", self.python, "--implementation", "cp"]
        newest = int(self.glibc.partition(".")[2])
        tags = [f"manylinux_2_{n}_{self.machine}" for n in range(newest, GLIBC_FIRST - 1, -1)]
        for tag in [*tags, f"manylinux2014_{self.machine}", f"linux_{self.machine}"]:
            options += ["--platform", tag]
        return options


def say(message: str) -> None:
    print(f"headrace bundle: {message}", flush=True)


def pins(lock: str, target: Target, without: Sequence[str] = ()) -> list[str]:
    """Return the lock's packages for a machine, as `name===version`: a build with a local version,
    such as a CPU's, is another one.

    Args:
        lock: text of the lock.
        without: names, with * and ?, that are left out.
    """
    found = []
    for line in lock.splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate(target.markers()):
            continue
        name = canonicalize_name(requirement.name)
        if not any(fnmatch.fnmatch(name, pattern) for pattern in without):
            found.append(f"{name}==={str(requirement.specifier).removeprefix('==')}")
    return found


def download(wanted: Sequence[str], target: Target, wheels: Path) -> None:
    """Have pip put wheels of these pins into a folder. Those that have none are built."""
    if _download(wanted, target, wheels):
        return
    say("not all have a wheel for this machine; fetching them one by one")
    for pin in wanted:
        if not _download([pin], target, wheels):
            _build(pin, wheels)


def _pip(*words: str) -> list[str]:
    quiet = ["--quiet", "--disable-pip-version-check"]
    return [sys.executable, "-m", "pip", words[0], *quiet, "--no-deps", *words[1:]]


def _download(wanted: Sequence[str], target: Target, wheels: Path) -> bool:
    only = ["--only-binary=:all:", *target.pip_options(), "--dest", str(wheels)]
    return subprocess.run(_pip("download", *only, *wanted), check=False).returncode == 0


def _build(pin: str, wheels: Path) -> None:
    """Build a wheel here; fails if it would not run on another machine."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(_pip("wheel", "--wheel-dir", folder, pin), check=False)
        made = list(Path(folder).glob("*.whl"))
        if done.returncode or not made:
            fail(f"{pin} has no wheel for this machine, and could not be built")
        if not made[0].name.endswith("-none-any.whl"):
            fail(f"{pin} has no wheel for this machine, and a build of it runs only on this one")
        shutil.move(made[0], wheels / made[0].name)


def select(wanted: Sequence[str], wheels: Path) -> list[Path]:
    """Return the wheels of the pins, by name. Fails if one is not in the folder."""
    by_pin = {}
    for path in sorted(wheels.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(path.name)
        by_pin[f"{name}==={version}"] = path
    missing = [pin for pin in wanted if pin not in by_pin]
    if missing:
        fail(f"{wheels} has no wheel of {', '.join(missing)}")
    return sorted({by_pin[pin] for pin in wanted})


def split(paths: Sequence[Path], out: Path, piece_bytes: int) -> list[dict[str, Any]]:
    """Write files, one after another, into pieces of a size; return the pieces' names, sizes and
    digests."""
    pieces: list[dict[str, Any]] = []
    pending = b""
    source = chunks(paths)
    more = True
    while more:
        name = f"piece-{len(pieces):04}"
        summed, size = hashlib.sha256(), 0
        with (out / name).open("wb") as file:
            while size < piece_bytes:
                if not pending and not (pending := next(source, b"")):
                    more = False
                    break
                part, pending = pending[: piece_bytes - size], pending[piece_bytes - size :]
                file.write(part)
                summed.update(part)
                size += len(part)
        if size:
            pieces.append({"name": name, "bytes": size, "sha256": summed.hexdigest()})
        else:
            (out / name).unlink()
    return pieces


def write_bundle(paths: Sequence[Path], target: Target, lock: str, out: Path, piece_mb: int) -> str:
    """Write pieces, manifest and installer into a folder; return the manifest's digest."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("piece-*"):
        old.unlink()
    manifest = {
        "format": FORMAT,
        "lock": lock,
        "python": target.python,
        "machine": target.machine,
        "glibc": target.glibc,
        "pieces": split(paths, out, piece_mb * MB),
        "wheels": [
            {"name": path.name, "bytes": path.stat().st_size, "sha256": digest(path)}
            for path in paths
        ],
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copy2(INSTALLER, out / "install.py")
    summed: str = digest(out / "manifest.json")
    return summed


def version(text: str) -> str:
    """Return a version of two numbers. Raises ArgumentTypeError for another text."""
    if not re.fullmatch(r"[0-9]+\.[0-9]+", text):
        raise argparse.ArgumentTypeError(f"must be two numbers, such as 3.12, got {text}")
    return text


def project_wheel(folder: Path) -> Path:
    """Build Headrace's own wheel from the tracked files."""
    from release import build  # type: ignore[import-not-found]

    made: Path = build(folder / "dist", folder / "source")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the bundle")
    parser.add_argument("--lock", type=Path, default=ROOT / "requirements" / "gpu.lock")
    python = "of the machine; default: %(default)s"
    parser.add_argument("--python", type=version, default="3.11", help=python)
    parser.add_argument("--machine", default="x86_64", help="default: %(default)s")
    parser.add_argument(
        "--glibc", type=version, default="2.31", help="oldest; default: %(default)s"
    )
    parser.add_argument("--piece-mb", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--wheels", type=Path, help="folder that keeps the downloaded wheels")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME",
        help="leave out what the machine has, such as torch or nvidia-*; may be repeated",
    )
    parser.add_argument("--only-lock", action="store_true", help="leave Headrace itself out")
    options = parser.parse_args()
    if options.piece_mb < 1:
        fail("--piece-mb: must be at least 1")
    if not options.lock.is_file():
        fail(f"--lock: {options.lock} is no file")
    target = Target(options.python, options.machine, options.glibc)
    wheels = options.wheels or options.out / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    wanted = pins(options.lock.read_text(), target, options.without)
    say(f"{len(wanted)} packages of {options.lock.name} for Python {target.python}")
    download(wanted, target, wheels)
    with tempfile.TemporaryDirectory() as folder:
        paths = select(wanted, wheels)
        if not options.only_lock:
            paths.append(project_wheel(Path(folder)))
        summed = write_bundle(paths, target, options.lock.name, options.out, options.piece_mb)
    if options.wheels is None:
        shutil.rmtree(wheels)
    size_mb = sum(path.stat().st_size for path in options.out.glob("piece-*")) // MB
    say(f"{size_mb} MB in {len(list(options.out.glob('piece-*')))} pieces in {options.out}")
    say(f"SHA-256 of manifest.json: {summed}")


if __name__ == "__main__":
    main()
