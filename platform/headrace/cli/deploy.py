"""Deploy the app on a Ray cluster and follow it until it serves; only this module imports Ray.

Ray and Serve read their environment when they are imported, so nothing may import them before the
environment of the node has been set.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class DeployError(RuntimeError):
    """The app did not come up; the text is the deployment's own reason."""


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


def import_app() -> None:
    """Import what the driver needs: many seconds of vLLM's layers, while Ray starts."""
    import headrace.app  # noqa: F401


def connect(address: str) -> None:
    """Connect this process to a cluster as a driver. Raises DeployError if it does not answer."""
    import ray

    logging.getLogger("ray").setLevel(logging.WARNING)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if ray.is_initialized():
        ray.shutdown()
    try:
        ray.init(
            address=address,
            namespace="headrace",
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except Exception as error:  # Ray raises many kinds for "not there"
        raise DeployError(f"no Ray cluster answers at {address}: {_one_line(error)}") from None


def disconnect() -> None:
    """Leave the cluster; harmless if not connected."""
    with contextlib.suppress(Exception):
        import ray

        ray.shutdown()


def has_app(name: str) -> bool:
    """Whether the cluster already runs an application of this name."""
    from ray import serve

    with contextlib.suppress(Exception):
        return name in serve.status().applications
    return False


def cluster_is_local() -> bool:
    """Whether all of the cluster's nodes are this machine, as far as Ray knows."""
    import ray

    return len([n for n in ray.nodes() if n.get("Alive")]) <= 1


def deploy(args: dict[str, Any], app: str, http: tuple[str, int] | None) -> None:
    """Start Serve and hand it the app; returns before the engines are loaded.

    Args:
        args: of `headrace.app:build_app`.
        app: the Serve application's name.
        http: where Serve's own proxy listens, or None for no proxy (the relay path needs none).

    Raises:
        DeployError: the app cannot be built.
    """
    from ray import serve

    from headrace.app import build_app

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # importing it set another
    try:
        application = build_app(args)
        if http is None:
            serve.start(proxy_location="Disabled")
        else:
            serve.start(proxy_location="EveryNode", http_options={"host": http[0], "port": http[1]})
        serve.run_many(
            [serve.RunTarget(application, name=app, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
    except Exception as error:
        raise DeployError(_one_line(error)) from error


def progress(app: str) -> Progress:
    """How far the app is."""
    from ray import serve

    status = serve.status().applications.get(app)
    if status is None:
        return Progress("NOT_STARTED", "", ())
    deployments = []
    for name, deployment in status.deployments.items():
        states = {_word(k): v for k, v in deployment.replica_states.items()}
        deployments.append(
            DeploymentProgress(
                name=name,
                status=_word(deployment.status),
                running=states.get("RUNNING", 0),
                total=sum(v for k, v in states.items() if k != "STOPPING"),
                message=deployment.message or "",
            )
        )
    return Progress(_word(status.status), status.message or "", tuple(deployments))


def follow(app: str, deadline: float, every_s: float = 1.0) -> Iterator[Progress]:
    """Progress until the app runs.

    Args:
        app: the Serve application's name.
        deadline: on time.monotonic()'s clock.
        every_s: between looks.

    Raises:
        DeployError: it failed, or the deadline passed.
    """
    while True:
        now = progress(app)
        yield now
        if now.status == "RUNNING":
            return
        if now.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise DeployError(failure(now))
        if time.monotonic() > deadline:
            waiting = [d.name for d in now.deployments if d.status != "HEALTHY"]
            raise DeployError(f"not ready in time; still waiting for {', '.join(waiting) or app}")
        time.sleep(every_s)


def failure(now: Progress) -> str:
    """The most telling message of a failed app: a deployment's, which holds the engine's error."""
    for status in ("DEPLOY_FAILED", "UNHEALTHY"):
        for deployment in now.deployments:
            if deployment.status == status:
                return f"{deployment.name}: {cause(deployment.message)}"
    return cause(now.message) or f"the app is {now.status.lower()}"


def cause(message: str) -> str:
    """The cause in a message that may hold a chain of tracebacks: the last line of the last one."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in message.splitlines()]
    lines = [line for line in lines if line]
    return lines[-1] if lines else ""


def undeploy(address: str, app: str, timeout_s: float, environment: dict[str, str]) -> bool:
    """Delete the app, letting requests in flight end, for at most `timeout_s` seconds.

    Returns:
        Whether it was deleted in time. Never raises: what is left is killed afterwards.
    """
    done = threading.Event()
    logging.disable(logging.WARNING)  # Ray's remarks on threads and deletions; we are leaving

    def work() -> None:
        with contextlib.suppress(Exception):
            # Serve initialises Ray where it finds it shut down, which happens when the time is over
            # and we leave. Without an address that would start a node of its own, for nobody.
            os.environ.update({**environment, "RAY_ADDRESS": address})
            import ray

            if not ray.is_initialized():
                connect(address)
            from ray import serve

            serve.delete(app)
            done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return done.wait(timeout_s)


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def _one_line(error: BaseException) -> str:
    """The error's cause; Ray wraps those of its actors in their tracebacks."""
    return cause(str(error)) or type(error).__name__
