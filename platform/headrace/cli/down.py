"""Stop an instance so that nothing of it remains: `headrace down`, and Ctrl-C in `headrace up`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from headrace.cli import cluster, state

DRAIN_S = 20.0  # for requests in flight; then the processes are ended


def logs_dir(name: str) -> Path:
    """Where the logs of a start that failed are kept, until the next start with that name."""
    return state.state_dir() / f"{name}.logs"


def stop(
    instance: state.Instance,
    say: Callable[[str], None] = lambda line: None,
    *,
    drain_s: float = DRAIN_S,
    keep_logs: bool = False,
) -> None:
    """End an instance and forget it. Idempotent; safe while it is still starting.

    Args:
        instance: as its state file describes it.
        say: told in a line what is being waited for.
        drain_s: seconds for requests in flight; 0 skips the orderly end.
        keep_logs: copy Ray's logs to `logs_dir` first.
    """
    joined = not instance.own_node
    if drain_s > 0 and instance.address and (joined or instance.phase == "ready"):
        say("letting requests in flight end")
        _drain(instance, drain_s)
    if "ray" in sys.modules:  # as a driver we must leave first, or our exit waits for the dead
        from headrace.cli import deploy

        deploy.disconnect()
    if instance.own_node:
        say("ending its processes")
        belongings = instance.belongings()
        if instance.temp_dir:
            cluster.stop(belongings, logs_dir(instance.name) if keep_logs else None)
    state.forget(instance.name)


def _drain(instance: state.Instance, drain_s: float) -> None:
    alive = instance.keeper is not None and instance.keeper.process() is not None
    if instance.own_node and not alive:
        return
    environment = {}
    if instance.own_node:
        environment = cluster.auth_environment(Path(instance.temp_dir))
    from headrace.cli import deploy

    deploy.undeploy(instance.address, instance.app, drain_s, environment)


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
    stop(old, drain_s=0)
