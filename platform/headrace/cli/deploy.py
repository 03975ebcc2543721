"""Deploying and deleting the app through `headrace.cli.driver`, a process of its own.

`AppDeployment` starts that process early, as it imports vLLM for many seconds. `Deletion` deletes
the app when told to, and also when this process dies without a word.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from headrace.cli.driver import DELETE, DISMISS, cause
from headrace.cli.state import Instance
from headrace.forkserver import LAUNCHER, py_executable

DRIVER = [*LAUNCHER, "-m", "headrace.cli.driver"]
END_S = 5.0  # for a driver to leave the cluster once its work is done
ORDER_S = 20.0  # for Ray to take the order to delete an app
DELETE_S = 15.0  # to delete it then, besides the time of its requests


class DeployError(RuntimeError):
    """The app did not come up, or was not deleted; the text is the reason in one line."""


@dataclass(frozen=True)
class DeploymentProgress:
    """One deployment at one moment."""

    name: str
    status: str  # Serve's words: UPDATING, HEALTHY, UNHEALTHY, ...
    running: int  # replicas
    total: int
    message: str


@dataclass(frozen=True)
class Progress:
    """The whole app at one moment."""

    status: str  # Serve's words: DEPLOYING, RUNNING, DEPLOY_FAILED, ...
    message: str
    deployments: tuple[DeploymentProgress, ...]

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Progress:
        """Make the progress in a driver's event."""
        deployments = tuple(DeploymentProgress(**each) for each in event["deployments"])
        return cls(event["status"], event["message"], deployments)


class _Driver:
    """One driver process: orders go in, events come out."""

    def __init__(self, verb: str, environment: Mapping[str, str], log: Path | None) -> None:
        self._log: IO[bytes] = open(log, "w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [*DRIVER, verb],
            # `uv run headrace up` would otherwise build a fresh environment for every worker.
            env={**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C and a killed process group are not meant for it
        )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, line: str) -> None:
        """Write one line of the order. A driver that has ended is noticed by `event`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def event(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next event; None if none comes in time.

        Raises:
            DeployError: the driver reports an error, or has ended.
        """
        try:
            event = self._events.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if event is None:
            raise DeployError(f"the process that talks to Ray {self._end()}")
        if "error" in event:
            error = DeployError(event["error"])
            error.add_note(event.get("traceback", ""))
            raise error
        return event

    def close(self, grace_s: float) -> None:
        """End the driver: close its stdin, and kill it after `grace_s` seconds. Idempotent."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                with contextlib.suppress(ValueError):
                    self._events.put(json.loads(line))
        self._events.put(None)

    def _end(self) -> str:
        """Describe how the driver ended, with the last line that it logged."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        code = self._process.poll()
        how = f"was ended by signal {-code}" if code and code < 0 else f"ended with status {code}"
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4096))
        last = cause(self._log.read().decode("utf-8", errors="replace"))
        return f"{how}: {last}" if last else how


class AppDeployment:
    """Deploys the app. Make it early: it begins by importing the app's code.

    Args:
        environment: added to this process's environment; Ray's settings and token.
        log: file for what Ray and vLLM print; None keeps it for error messages only.
    """

    def __init__(self, environment: Mapping[str, str], log: Path | None) -> None:
        self._driver = _Driver("deploy", environment, log)

    def connect(self, address: str, app: str, *, joined: bool, deadline: float) -> str:
        """Connect to the cluster at `address`. Return the address that the cluster gives.

        Args:
            address: `host:port`, or `auto`.
            app: the Serve application's name.
            joined: the cluster is not ours, so an application of that name is an error.
            deadline: on time.monotonic()'s clock.

        Raises:
            DeployError: no cluster answers, or it runs an application of that name.
        """
        # Only on a node of our own is the launcher surely at this place.
        runtime_env = None if joined else {"py_executable": py_executable()}
        order = {"address": address, "app": app, "joined": joined, "runtime_env": runtime_env}
        self._driver.send(json.dumps(order))
        event = self._driver.event(deadline - time.monotonic())
        if event is None:
            raise DeployError(f"no connection to Ray at {address} in time")
        return str(event["connected"])

    def run(self, args: dict[str, Any], deadline: float) -> Iterator[Progress]:
        """Deploy, and yield the app's progress until it runs.

        Args:
            args: arguments of `headrace.app:build_app`.
            deadline: on time.monotonic()'s clock.

        Raises:
            DeployError: it failed, or the deadline passed.
        """
        self._driver.send(json.dumps({"args": args}))
        now = Progress("NOT_STARTED", "", ())
        while now.status != "RUNNING":
            event = self._driver.event(deadline - time.monotonic())
            if event is None:
                waiting = [d.name for d in now.deployments if d.status != "HEALTHY"]
                what = ", ".join(waiting) or "the app"
                raise DeployError(f"not ready in time; still waiting for {what}")
            now = Progress.of(event["progress"])
            yield now
            if now.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise DeployError(failure(now))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """End the driver process: at once if the deployment failed."""
        self._driver.close(END_S if kind is None else 0.0)


class Deletion:
    """Deletes the app from its cluster, letting requests in flight end.

    The driver process waits for `go` or `dismiss`. If this process dies before either, even by
    SIGKILL, the driver deletes the app and forgets the instance.

    Args:
        instance: the app's instance; the cluster's address must be known.
        environment: added to this process's environment; Ray's token.
    """

    def __init__(self, instance: Instance, environment: Mapping[str, str]) -> None:
        self._driver = _Driver("delete", environment, None)
        keys = ("address", "app", "name", "token")
        order = {key: getattr(instance, key) for key in keys}
        self._wait_s = instance.drain_s + DELETE_S
        self._driver.send(json.dumps({**order, "wait_s": self._wait_s}))

    def go(self) -> None:
        """Delete the app; its requests in flight may end within the instance's `drain_s`.

        Raises:
            DeployError: Ray did not take the order, or the app was not deleted in time; with the
                reason.
        """
        self._driver.send(DELETE)
        try:
            if self._driver.event(ORDER_S) is None:
                raise DeployError(f"Ray did not take the order within {ORDER_S:g} s")
            if self._driver.event(self._wait_s + END_S) is None:
                raise DeployError(f"it was not deleted within {self._wait_s:g} s")
        finally:
            self._driver.close(grace_s=0.0)

    def dismiss(self) -> None:
        """Leave the app alone. Idempotent."""
        self._driver.send(DISMISS)
        self._driver.close(END_S)


def failure(now: Progress) -> str:
    """Return the most useful message of a failed app: a deployment's, with the engine's error."""
    for status in ("DEPLOY_FAILED", "UNHEALTHY"):
        for deployment in now.deployments:
            if deployment.status == status:
                return f"{deployment.name}: {cause(deployment.message)}"
    return cause(now.message) or f"the app is {now.status.lower()}"
