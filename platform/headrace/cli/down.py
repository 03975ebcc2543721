"""Stop an instance so that nothing of it remains: `headrace down`, and Ctrl-C in `headrace up`.

An instance with a Ray node of its own is stopped by ending the node's processes, which are known by
pid and start time, by descent, and by a token in their environment. Before that, its app is deleted
from Ray Serve so that requests in flight can end; if that fails, the processes are ended anyway.

An app on a cluster that we joined (`--address`) is only deleted: the cluster's processes are not
ours. If that fails, the instance is kept, so that `headrace down` can be tried again.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from headrace.cli import cluster, state
from headrace.cli.console import CliError
from headrace.cli.deploy import Deletion, DeployError
from headrace.observability.shared_memory import ProcessId

OTHER_S = 60.0  # for another process that stops the instance, besides its requests' time


def logs_dir(name: str) -> Path:
    """Return the folder with the logs of a failed start, kept until the next start of that name."""
    return state.state_dir() / f"{name}.logs"


def stop(
    instance: state.Instance,
    say: Callable[[str], None] = lambda line: None,
    *,
    drain: bool = True,
    keep_logs: bool = False,
    deletion: Deletion | None = None,
    forget: bool = False,
) -> None:
    """End an instance and forget it. Idempotent; safe while it is still starting.

    Args:
        instance: as its state file describes it.
        say: called with a line about each wait.
        drain: let requests in flight end.
        keep_logs: copy Ray's logs to `logs_dir` first.
        deletion: of its app, if the caller has one; it is used up.
        forget: leave an app on a joined cluster alone.

    Raises:
        CliError: its app is on a cluster that we joined, and could not be deleted.
    """
    phase = instance.phase
    _mark(instance)
    if not instance.own_node:
        if instance.address and not forget:
            say(f"deleting its app; {_waits(instance)}")
            try:
                (deletion or Deletion(instance, {})).go()
            except DeployError as error:
                instance.phase, instance.stopper = phase, None
                state.save(instance)
                raise CliError(_still_there(instance, error)) from error
    else:
        if drain and phase != "starting" and _alive(instance.supervisor):
            say(f"{_waits(instance)}; Ctrl-C ends them now")
            environment = cluster.auth_environment(Path(instance.temp_dir))
            with contextlib.suppress(DeployError):
                Deletion(instance, environment).go()
        if instance.temp_dir:
            say("ending its processes")
            cluster.stop(instance.matcher(), logs_dir(instance.name) if keep_logs else None)
    state.remove(instance.name, instance.token)


def stopped_elsewhere(instance: state.Instance) -> bool:
    """Whether another process stops this instance, or has stopped it.

    A ready instance whose state file is lost continues as long as its Ray node runs.
    """
    found = state.load(instance.name)
    if found is not None and found.token == instance.token:
        return found.stopper not in (None, _me())
    if instance.phase == "starting":
        return True
    if instance.own_node:
        return not _alive(instance.supervisor)
    return found is not None or not state.path_of(instance.name).exists()


def wait_for_other(instance: state.Instance) -> bool:
    """Wait until the process that stops this instance is done. Return whether it did its work."""
    deadline = time.monotonic() + instance.drain_s + OTHER_S
    while time.monotonic() < deadline:
        found = state.load(instance.name)
        if found is None or found.token != instance.token:
            return True
        if not _alive(found.stopper):
            return False
        time.sleep(0.1)
    return False


def clear_leftovers(name: str) -> None:
    """Clean up after an instance of this name that died, and drop its old logs.

    Raises:
        FileExistsError: it still runs.
    """
    shutil.rmtree(logs_dir(name), ignore_errors=True)
    old = state.load(name)
    if old is None:
        state.path_of(name).unlink(missing_ok=True)  # unreadable, or not there
        return
    if old.running():
        raise FileExistsError(name)
    stop(old, drain=False)


def _mark(instance: state.Instance) -> None:
    """Record that this process stops the instance, so that `headrace up` in another shell ends
    without error."""
    instance.phase, instance.stopper = "stopping", _me()
    found = state.load(instance.name)
    if found is not None and found.token == instance.token:
        state.save(instance)


def _me() -> ProcessId:
    return ProcessId.of(psutil.Process())


def _alive(who: ProcessId | None) -> bool:
    return who is not None and who.process() is not None


def _waits(instance: state.Instance) -> str:
    return f"requests in flight may end, within {instance.drain_s:g} s"


def _still_there(instance: state.Instance, error: DeployError) -> str:
    name = "" if instance.name == "default" else f" --name {instance.name}"
    return (
        f'the application "{instance.app}" on the cluster at {instance.address} was not deleted: '
        f"{error}. Try again, or, if the cluster is gone: headrace down{name} --forget"
    )
