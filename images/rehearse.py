"""Carry out a Dockerfile's steps without a container engine: in namespaces, over a folder as base.

python images/rehearse.py images/cpu.Dockerfile --base ROOT --out FOLDER [--secret pip=FILE]

For machines that have root but no engine. `ROOT` stands for the base image: a file system with bash
and Python 3.11 (`debootstrap --variant=minbase --include=python3,python3-venv bookworm ROOT`). Each
stage is an overlay on it; RUN steps are carried out in a chroot with the stage's environment, as
root, COPY takes only what .dockerignore lets through. What it cannot show: the base image itself,
layers, and an engine's limits. ROOT stays as it is. FOLDER/STAGE is each stage's file system.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

CONTEXT = Path(__file__).resolve().parent.parent
APART = "HEADRACE_REHEARSAL_APART"


@dataclass(frozen=True)
class Step:
    """One instruction: FROM, RUN, ..., its words, and the line where it begins."""

    name: str
    text: str
    line: int


def steps(text: str) -> Iterator[Step]:
    """The instructions of a Dockerfile, continued lines joined, comments left out."""
    joined, begun = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not joined and not line.strip()):
            continue
        begun = begun if joined else number
        if line.rstrip().endswith("\\"):
            joined += line.rstrip()[:-1] + " "
            continue
        name, _, rest = (joined + line).strip().partition(" ")
        yield Step(name.upper(), rest.strip(), begun)
        joined = ""


def ignored(path: str, rules: list[str]) -> bool:
    """Whether .dockerignore keeps a file of the context from the builder; the last match counts."""
    parts = path.split("/")
    above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    out = False
    for rule in rules:
        pattern = rule.removeprefix("!")
        if any(fnmatch(p, pattern) and p.count("/") == pattern.count("/") for p in above) or (
            pattern.startswith("**/") and any(fnmatch(part, pattern[3:]) for part in parts)
        ):
            out = not rule.startswith("!")
    return out


def rules(context: Path = CONTEXT) -> list[str]:
    """The lines of .dockerignore."""
    lines = (context / ".dockerignore").read_text("utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def context_files(source: str, context: Path = CONTEXT) -> list[Path]:
    """The files that COPY takes for one source, relative to the context."""
    lines = rules(context)
    place = context / source
    found = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.is_file())
    relative = (p.relative_to(context) for p in found)
    return [p for p in relative if not ignored(str(p), lines)]


@dataclass
class Stage:
    root: Path
    env: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])


class Rehearsal:
    def __init__(self, base: Path, out: Path, secrets: dict[str, Path], binds: list[Path]) -> None:
        self.base, self.out, self.secrets, self.binds = base, out, secrets, binds
        self.arguments: dict[str, str] = {}
        self.stages: dict[str, Stage] = {}
        self.stage: Stage | None = None

    def carry_out(self, text: str) -> None:
        for step in steps(text):
            print(f"{step.line}: {step.name} {step.text[:110]}", flush=True)
            getattr(self, f"_{step.name.lower()}", self._nothing)(step.text)

    def _now(self) -> Stage:
        assert self.stage is not None, "FROM comes first"
        return self.stage

    def _nothing(self, text: str) -> None:
        """LABEL, USER, VOLUME, ENTRYPOINT, CMD change no file."""

    def _from(self, text: str) -> None:
        name = text.split(" AS ")[-1].strip()
        root, upper, work = (self.out / kind / name for kind in ("", "upper", "work"))
        for folder in (root, upper, work):
            folder.mkdir(parents=True)
        options = f"lowerdir={self.base},upperdir={upper},workdir={work}"
        call("mount", "-t", "overlay", "overlay", "-o", options, str(root))
        for place in ("proc", "sys", "dev"):  # UCX lists network devices in /sys
            call("mount", "--rbind", f"/{place}", str(root / place))
        for bind in self.binds:
            target = root / str(bind).lstrip("/")
            target.mkdir(parents=True, exist_ok=True)
            call("mount", "--bind", str(bind), str(target))
        for file in ("/etc/resolv.conf", "/etc/hosts"):
            shutil.copy(file, root / file.lstrip("/"))
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.stage = self.stages[name] = Stage(root, {"PATH": path, "HOME": "/root"})

    def _arg(self, text: str) -> None:
        name, _, value = text.partition("=")
        self.arguments.setdefault(name, value)

    def _env(self, text: str) -> None:
        now = self._now()
        known = self.arguments | now.env
        for word in shlex.split(text):
            name, _, value = word.partition("=")
            now.env[name] = re.sub(r"\$\{?(\w+)\}?", lambda m: known.get(m.group(1), ""), value)

    def _shell(self, text: str) -> None:
        self._now().shell = json.loads(text)

    def _workdir(self, text: str) -> None:
        now = self._now()
        now.folder = text
        (now.root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _copy(self, text: str) -> None:
        now = self._now()
        *sources, target = (w for w in text.split() if not w.startswith("--"))
        origin = re.search(r"--from=(\S+)", text)
        place = now.root / os.path.join(now.folder, target).lstrip("/")
        for source in sources:
            if origin is not None:
                call("cp", "-a", f"{self.stages[origin.group(1)].root}{source}/.", f"{place}/")
                continue
            one = (CONTEXT / source).is_file()
            for file in context_files(source):
                into = place if one and not target.endswith("/") else place / file.name
                into = into if one else place / file.relative_to(source)
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(CONTEXT / file, into)

    def _run(self, text: str) -> None:
        now, mounted = self._now(), []
        while mount := re.match(r"--mount=(\S+)\s+", text):
            text = text[mount.end() :]
            fields = dict(part.split("=", 1) for part in mount.group(1).split(","))
            if (file := self.secrets.get(fields.get("id", ""))) is not None:
                target = now.root / fields["target"].lstrip("/")
                target.touch()
                call("mount", "--bind", str(file), str(target))
                mounted.append(target)
        env = now.env | {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
        command = [f"cd {shlex.quote(now.folder)} && {text}"]
        try:
            call("chroot", str(now.root), *now.shell, *command, env=env)
        finally:
            for target in mounted:
                call("umount", str(target))


def call(*command: str, env: dict[str, str] | None = None) -> None:
    if subprocess.run(command, env=env, check=False).returncode != 0:
        sys.exit(f"error: this step failed: {' '.join(command)[:300]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Carry out a Dockerfile's steps in namespaces.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--base", type=Path, required=True, help="file system of the base image")
    parser.add_argument("--out", type=Path, required=True, help="empty folder for the stages")
    parser.add_argument("--secret", action="append", default=[], metavar="ID=FILE")
    parser.add_argument("--bind", action="append", default=[], type=Path, help="folder to show")
    parser.add_argument("--then", help="shell command in the last stage, as its user 1000")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("error: this needs root, for mounts and chroot")
    if APART not in os.environ:  # mounts end with the namespace
        os.environ[APART] = "1"
        os.execvp("unshare", ["unshare", "-m", sys.executable, *sys.argv])
    secrets = {k: Path(v).absolute() for k, _, v in (s.partition("=") for s in options.secret)}
    options.out.mkdir(parents=True, exist_ok=True)
    rehearsal = Rehearsal(options.base.absolute(), options.out.absolute(), secrets, options.bind)
    rehearsal.carry_out(options.file.read_text("utf-8"))
    if options.then and rehearsal.stage is not None:
        last = rehearsal.stage
        call("mount", "-o", "remount,ro", str(last.root))  # as readOnlyRootFilesystem
        for place in ("tmp", "cache", "home/headrace"):
            call("mount", "-t", "tmpfs", "-o", "mode=1777", "none", str(last.root / place))
        words = ("chroot", "--userspec=1000:1000", str(last.root), "bash", "-lc", options.then)
        call(*words, env=last.env)


if __name__ == "__main__":
    main()
