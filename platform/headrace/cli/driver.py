"""The process that connects to Ray: it deploys the app, or deletes it.

Run as `python -m headrace.cli.driver deploy` or `... delete`. Only this process is a Ray driver, so
the command line itself imports neither Ray nor vLLM, and a crash in Ray's client cannot change what
`headrace down` reports. Orders come on stdin and events go to stdout, one JSON object a line;
`headrace.cli.deploy` is the other end.

Ray and Serve read their environment when they are imported. The environment must therefore be
complete when this process starts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from headrace.cli import state
from headrace_kvstore.protocol.address import split_host_port

CONNECT_S = 10.0  # for a connection to the cluster's port
FOLLOW_S = 1.0  # between two reads of the app's status
DELETED_S = 0.2  # the same of an app that is being deleted
DELETE, DISMISS = "delete", "dismiss"  # what `Deletion` may say after its order

Emit = Callable[[dict[str, Any]], None]


class DriverError(RuntimeError):
    """The order cannot be carried out; the text is one line for the user."""


def main(verb: str, orders: TextIO, events: TextIO) -> None:
    """Carry out one order. Failures are events, not exceptions."""

    def emit(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    try:
        {"deploy": _deploy, "delete": _delete}[verb](orders, emit)
    except BrokenPipeError:
        pass  # the command line has ended
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):
            emit({"error": one_line(error), "traceback": traceback.format_exc()})


def _deploy(orders: TextIO, emit: Emit) -> None:
    """Connect when told to, deploy when told to, and report progress until the app runs."""
    from headrace.app import build_app  # takes many seconds, because it imports vLLM

    if (order := _order(orders)) is None:
        return
    app = order["app"]
    address = connect(order["address"], order["runtime_env"])
    try:
        if order["joined"] and app in _applications():
            raise DriverError(f'the cluster already runs an application called "{app}"')
        emit({"connected": address})
        if (order := _order(orders)) is None:
            return
        run(build_app(order["args"]), app)
        for progress in follow(app):
            emit({"progress": progress})
    finally:
        disconnect()


def _delete(orders: TextIO, emit: Emit) -> None:
    """Delete the app when told to, or when the command line ends without a word."""
    if (order := _order(orders)) is None:
        return
    word = orders.readline().strip()
    if word == DISMISS:
        return
    logging.disable(logging.WARNING)  # Ray's remarks on deletions
    connect(order["address"])
    from ray import serve

    serve.delete(order["app"], _blocking=False)  # Serve itself would wait for 60 s at most
    if word == DELETE:  # else the pipe is closed
        emit({"deleting": order["app"]})
    deadline = time.monotonic() + order["wait_s"]
    while order["app"] in _applications():
        if time.monotonic() > deadline:
            raise DriverError(f"it was not deleted within {order['wait_s']:g} s")
        time.sleep(DELETED_S)
    if word != DELETE:  # the command line has ended and cannot do it
        state.remove(order["name"], order["token"])
    emit({"deleted": order["app"]})


def _order(orders: TextIO) -> dict[str, Any] | None:
    """Return the next order; None if the command line has closed the pipe."""
    line = orders.readline()
    return dict(json.loads(line)) if line else None


def connect(address: str, runtime_env: dict[str, Any] | None = None) -> str:
    """Connect to a cluster; returns its own address (`auto` is resolved).

    Args:
        runtime_env: Ray's `runtime_env` of all workers of this job.

    Raises:
        DriverError: no cluster answers there.
    """
    if ":" in address and "://" not in address:  # Ray itself would try for more than a minute
        try:
            socket.create_connection(split_host_port(address), CONNECT_S).close()
        except ValueError as error:
            raise DriverError(f"ray.address: {error}") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise DriverError(f"no Ray cluster answers at {address}: {reason}") from None
    import ray

    logging.getLogger("ray").setLevel(logging.WARNING)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        ray.init(
            address=address,
            runtime_env=runtime_env,
            namespace="headrace",
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except Exception as error:  # Ray raises many kinds for "not there"
        raise DriverError(f"no Ray cluster answers at {address}: {one_line(error)}") from None
    return str(ray.get_runtime_context().gcs_address)


def disconnect() -> None:
    """Leave the cluster; harmless if not connected."""
    with contextlib.suppress(Exception):
        import ray

        ray.shutdown()


def run(application: Any, app: str) -> None:
    """Start Serve and hand it the application; returns before the engines are loaded.

    Args:
        application: as `headrace.app:build_app` makes it.
        app: the Serve application's name.
    """
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # importing it set another
    serve.start(proxy_location="Disabled")
    serve.run_many(
        [serve.RunTarget(application, name=app, route_prefix="/")],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )


def follow(app: str) -> Iterator[dict[str, Any]]:
    """Yield the app's progress, as `deploy.Progress` reads it, until it runs or has failed."""
    while True:
        now = _progress(app)
        yield now
        if now["status"] in ("RUNNING", "DEPLOY_FAILED", "UNHEALTHY"):
            return
        time.sleep(FOLLOW_S)


def _progress(app: str) -> dict[str, Any]:
    status = _applications().get(app)
    if status is None:
        return {"status": "NOT_STARTED", "message": "", "deployments": []}
    deployments = []
    for name, deployment in status.deployments.items():
        states = {_word(k): v for k, v in deployment.replica_states.items()}
        deployments.append(
            {
                "name": name,
                "status": _word(deployment.status),
                "running": states.get("RUNNING", 0),
                "total": sum(v for k, v in states.items() if k != "STOPPING"),
                "message": deployment.message or "",
            }
        )
    message = status.message or ""
    return {"status": _word(status.status), "message": message, "deployments": deployments}


def _applications() -> dict[str, Any]:
    from ray import serve

    return dict(serve.status().applications)


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def cause(message: str) -> str:
    """Return the cause in a message with a chain of tracebacks: the last line of the last one,
    without the name of a class of Headrace."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in message.splitlines()]
    lines = [line for line in lines if line]
    return re.sub(r"^headrace\w*(\.\w+)+: ", "", lines[-1]) if lines else ""


def one_line(error: BaseException) -> str:
    """Return the error's cause; Ray wraps the errors of its actors in their tracebacks."""
    return cause(str(error)) or type(error).__name__


def start(verb: str) -> None:
    """Run as a process: libraries print to stderr, events have the real stdout for themselves."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as events:
        os.dup2(2, 1)
        main(verb, sys.stdin, events)
    os._exit(0)  # Ray's client has nothing left to do, and its threads may crash on the way out


if __name__ == "__main__":
    start(sys.argv[1])
