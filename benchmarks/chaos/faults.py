"""What is broken, one at a time, and who is hit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import psutil

STOPPED_S = 10.0

Status = Mapping[str, Any]


def _one(status: Status, role: str, number: int) -> Mapping[str, Any]:
    found = sorted(
        (each for each in status["replicas"] if each["role"] == role),
        key=lambda each: str(each["replica_id"]),
    )
    return dict(found[number % len(found)])


def _family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def kill_decode(status: Status, number: int) -> str:
    """SIGKILL to a decode replica."""
    victim = _one(status, "decode", number)
    os.kill(victim["pid"], signal.SIGKILL)
    return str(victim["replica_id"])


def kill_prefill(status: Status, number: int) -> str:
    """SIGKILL to a prefill replica."""
    victim = _one(status, "prefill", number)
    os.kill(victim["pid"], signal.SIGKILL)
    return str(victim["replica_id"])


def kill_engine(status: Status, number: int) -> str:
    """SIGKILL to the engine of a decode replica, which lives on without it."""
    victim = _one(status, "decode", number)
    for process in _family(victim["pid"]):
        if "EngineCore" in " ".join(process.cmdline() or [process.name()]):
            process.kill()
    return str(victim["replica_id"])


def stop_decode(status: Status, number: int) -> str:
    """SIGSTOP to a decode replica and its engine for `STOPPED_S`."""
    victim = _one(status, "decode", number)
    family = _family(victim["pid"])
    for process in family:
        process.suspend()

    def resume() -> None:
        for process in family:
            if process.is_running():
                process.resume()

    threading.Timer(STOPPED_S, resume).start()
    return str(victim["replica_id"])


def kill_gateway(status: Status, number: int) -> str:
    """SIGKILL to a gateway; clients resume their streams (docs/replay.md)."""
    os.kill(status["gateway"]["pid"], signal.SIGKILL)
    return ""


def kill_store(status: Status, number: int) -> str:
    """SIGKILL to a machine's StoreNode."""
    nodes = status["store"]
    os.kill(nodes[number % len(nodes)]["pid"], signal.SIGKILL)
    return ""


FAULTS: dict[str, Callable[[Status, int], str]] = {
    "kill_decode": kill_decode,
    "kill_engine": kill_engine,
    "stop_decode": stop_decode,
    "kill_prefill": kill_prefill,
    "kill_gateway": kill_gateway,
    "kill_store": kill_store,
}
"""By name; each breaks one thing. It returns the decode or prefill replica that it hit, if it hit
one. The number picks which."""
BY_REPLICA = frozenset({"kill_decode", "kill_engine", "stop_decode"})
"""Those that cut the streams of the replica that they hit."""
