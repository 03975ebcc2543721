"""The state file of each running instance: NAME.json in a private folder.

The folder is `$HEADRACE_STATE`, else `$XDG_STATE_HOME/headrace`, else `~/.local/state/headrace`. A
file has mode 0600, because it may contain an API key. It is created exclusively, so two `up` with
the same name cannot both start.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from headrace.cli.process_matcher import ProcessMatcher
from headrace.observability.shared_memory import ProcessId

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


@dataclass
class Instance:
    """One `headrace up`, as its state file describes it."""

    name: str
    token: str  # in the environment of all its processes
    phase: str = "starting"  # then "ready", at last "stopping"
    endpoint: str = ""  # http://host:port
    model: str = ""
    app: str = "headrace"  # the Serve application's name
    address: str = ""  # of the Ray cluster
    own_node: bool = True  # False: on a cluster that it joined
    temp_dir: str = ""
    dashboard_url: str | None = None
    api_key: str | None = None
    tls_cert_file: str | None = None  # the endpoint's own certificate
    starter: ProcessId | None = None  # the `headrace up` process
    stopper: ProcessId | None = None  # the process that stops it, once one does
    supervisor: ProcessId | None = None
    started_at: float = 0.0  # seconds since the epoch
    shm_before: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)  # names of several models
    drain_s: float = 20.0  # longest time for requests in flight when it is stopped

    def matcher(self) -> ProcessMatcher:
        """Return the facts by which its processes and files are recognised."""
        return ProcessMatcher(
            self.token,
            Path(self.temp_dir),
            [self.supervisor] if self.supervisor else [],
            frozenset(self.shm_before),
        )

    def running(self) -> bool:
        """Whether its supervisor or starter lives. On a joined cluster, a ready app counts too."""
        if not self.own_node and self.phase != "starting":
            return True
        return any(
            p is not None and p.process() is not None for p in (self.supervisor, self.starter)
        )


def state_dir() -> Path:
    """Return the folder of the state files; it may not exist yet."""
    if own := os.environ.get("HEADRACE_STATE"):
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "headrace"


def path_of(name: str) -> Path:
    """Return the state file of a name. Raises ValueError if it cannot be a name."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f'"{name}" cannot be a name: use 1 to 32 letters, digits, "-" and "_", a letter or '
            "digit first"
        )
    return state_dir() / f"{name}.json"


def create(instance: Instance) -> None:
    """Create the state file. Raises FileExistsError if the name is in use."""
    file = path_of(instance.name)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        json.dump(asdict(instance), out)


def save(instance: Instance) -> None:
    """Replace the state file, atomically."""
    file = path_of(instance.name)
    part = file.with_suffix(f".{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        json.dump(asdict(instance), out, indent=1)
    part.replace(file)


def load(name: str) -> Instance | None:
    """Return the instance of a name, or None. A file that cannot be read counts as none."""
    file = path_of(name)
    try:
        data = json.loads(file.read_text("utf-8"))
        for key in ("starter", "stopper", "supervisor"):
            data[key] = ProcessId(**data[key]) if data.get(key) else None
        known = {each.name for each in fields(Instance)}  # another version may have written it
        return Instance(**{key: value for key, value in data.items() if key in known})
    except (OSError, TypeError, AttributeError, ValueError):
        return None


def remove(name: str, token: str) -> None:
    """Remove the state of one instance, if it exists and no other instance has the name now."""
    found = load(name)
    if found is not None and found.token == token:
        path_of(name).unlink(missing_ok=True)


def instances() -> Iterator[Instance]:
    """Yield all instances that have a state file, by name, running or not."""
    folder = state_dir()
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        if NAME.fullmatch(file.stem) and (instance := load(file.stem)) is not None:
            yield instance
