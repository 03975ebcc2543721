"""Install an offline bundle on a machine without a network. Needs Python with pip, nothing else.

    python3 install.py --check                       # are all pieces here, and whole?
    python3 install.py --venv /opt/headrace          # into an environment, made if missing
    python3 install.py --target FOLDER               # into a folder, for PYTHONPATH

Pieces and wheels are compared with the SHA-256 of `manifest.json`, before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

FORMAT = 1
CHUNK_BYTES = 1 << 20
FIELDS = {"name": str, "bytes": int, "sha256": str}


def fail(message: str) -> NoReturn:
    """End with one line on stderr and status 1."""
    sys.exit(f"error: {message}")


def read_manifest(path: Path, expected: str | None = None) -> dict[str, Any]:
    """Return the manifest. Fails if it has another digest than expected, or is not one."""
    if not path.is_file():
        fail(f"{path} is missing")
    text = path.read_bytes()
    if expected is not None and hashlib.sha256(text).hexdigest() != expected.lower():
        fail(f"{path.name} is another one: its SHA-256 is {hashlib.sha256(text).hexdigest()}")
    try:
        manifest = json.loads(text)
    except ValueError as error:
        fail(f"{path.name}: {error}")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        fail(f"{path.name}: format must be {FORMAT}")
    for kind in ("pieces", "wheels"):
        for number, one in enumerate(_list(manifest, kind)):
            where = f"{path.name}: {kind}[{number}]"
            for name, of in FIELDS.items():
                if not isinstance(one, dict) or not isinstance(one.get(name), of):
                    fail(f"{where}.{name}: must be {of.__name__}")
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", one["name"]):
                fail(f"{where}.name: must be the name of a file")
    return manifest


def _list(manifest: dict[str, Any], name: str) -> list[Any]:
    found = manifest.get(name)
    return found if isinstance(found, list) else fail(f"manifest.json: {name}: must be a list")


def why_not_this_machine(manifest: dict[str, Any]) -> str | None:
    """Return why the wheels do not run here; None if they do."""
    here = ".".join(map(str, sys.version_info[:2]))
    if manifest.get("python") != here:
        return f"the bundle is for Python {manifest.get('python')}, and this is {here}"
    if manifest.get("machine") != platform.machine():
        return f"the bundle is for {manifest.get('machine')}, and this is {platform.machine()}"
    glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0.0").split()[1]
    if _numbers(glibc) < _numbers(str(manifest.get("glibc"))):
        return f"the bundle needs glibc {manifest.get('glibc')}, and this machine has {glibc}"
    return None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def damaged_pieces(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Return a line for each piece that is missing or damaged."""
    wrong = []
    for piece in manifest["pieces"]:
        path = folder / piece["name"]
        if not path.is_file():
            wrong.append(f"{piece['name']} is missing")
        elif path.stat().st_size != piece["bytes"]:
            wrong.append(
                f"{piece['name']} has {path.stat().st_size} bytes instead of {piece['bytes']}"
            )
        elif digest(path) != piece["sha256"]:
            wrong.append(f"{piece['name']} is damaged")
    return wrong


def digest(path: Path) -> str:
    """Return the file's SHA-256, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(folder: Path, manifest: dict[str, Any], out: Path) -> list[Path]:
    """Write the wheels into a folder; return their paths. Fails if one is not the manifest's."""
    source = chunks(folder / piece["name"] for piece in manifest["pieces"])
    pending, made = b"", []
    for wheel in manifest["wheels"]:
        path, left, summed = out / wheel["name"], wheel["bytes"], hashlib.sha256()
        with path.open("wb") as file:
            while left:
                if not pending and not (pending := next(source, b"")):
                    fail(f"the pieces end within {wheel['name']}")
                part, pending = pending[:left], pending[left:]
                file.write(part)
                summed.update(part)
                left -= len(part)
        if summed.hexdigest() != wheel["sha256"]:
            fail(f"{wheel['name']} is damaged")
        made.append(path)
    return made


def chunks(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yield the bytes of files, one after another."""
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk


def install(wheels: list[Path], venv: Path | None, target: Path | None) -> None:
    """Install wheels with pip, which asks no index."""
    python = Path(sys.executable)
    if venv is not None:
        python = venv.absolute() / "bin" / "python"
        if not python.exists() and subprocess.run([sys.executable, "-m", "venv", venv]).returncode:
            fail(f"cannot make {venv}")
    words = ["--no-index", "--no-deps", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    if target is not None:
        words += ["--no-compile", "--upgrade", "--target", str(target)]
    done = subprocess.run([python, "-m", "pip", "install", *words, *wheels])
    if done.returncode:
        fail("pip stopped, for the reason above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the pieces, install nothing")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--venv", type=Path, help="environment, made if it is missing")
    where.add_argument("--target", type=Path, help="folder, for PYTHONPATH")
    parser.add_argument("--manifest-sha256", metavar="HEX", help="digest that bundle.py printed")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs on any machine's Python
        fail(f"Python 3.11 or newer is needed, and this is {platform.python_version()}")
    if not (options.check or options.venv or options.target):
        parser.error("give --check, --venv or --target")
    folder = Path(__file__).resolve().parent
    manifest = read_manifest(folder / "manifest.json", options.manifest_sha256)
    wrong = damaged_pieces(folder, manifest)
    if wrong:
        fail("; ".join(wrong))
    print(f"{len(manifest['pieces'])} pieces are whole", flush=True)
    if options.check:
        return
    if (reason := why_not_this_machine(manifest)) is not None:
        fail(reason)
    with tempfile.TemporaryDirectory(dir=folder, prefix="wheels-") as there:
        install(unpack(folder, manifest, Path(there)), options.venv, options.target)
    print(f"{len(manifest['wheels'])} packages are installed", flush=True)


if __name__ == "__main__":
    main()
