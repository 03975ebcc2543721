"""Faults, which break one thing at a time, and the replicas that they hit."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from benchmarks.chaos.apps import BACK_S, App, is_engine

STOPPED_S, SLOW_S, FULL_S = 30.0, 20.0, 10.0
RUNS_S, HELD_S = 0.02, 0.08
"""Seconds for which a slow replica alternately runs and is stopped."""


def _one(app: App, role: str, number: int) -> Mapping[str, Any]:
    found = sorted(
        (each for each in app.status()["replicas"] if each["role"] == role),
        key=lambda each: str(each["replica_id"]),
    )
    return dict(found[number % len(found)])


def _family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def kill_decode(app: App, number: int) -> str:
    """Kill a decode replica (SIGKILL)."""
    victim = _one(app, "decode", number)
    os.kill(victim["pid"], signal.SIGKILL)
    return str(victim["replica_id"])


def kill_prefill(app: App, number: int) -> str:
    """Kill a prefill replica (SIGKILL)."""
    victim = _one(app, "prefill", number)
    os.kill(victim["pid"], signal.SIGKILL)
    return str(victim["replica_id"])


def kill_engine(app: App, number: int) -> str:
    """Kill the engine of a decode replica (SIGKILL); the replica itself keeps running."""
    victim = _one(app, "decode", number)
    for process in _family(victim["pid"]):
        if is_engine(process):
            process.kill()
    return str(victim["replica_id"])


def stop_decode(app: App, number: int) -> str:
    """Stop a decode replica and its engine for `STOPPED_S` (SIGSTOP)."""
    victim = _one(app, "decode", number)
    _stop(_family(victim["pid"]))
    return str(victim["replica_id"])


def stop_engine(app: App, number: int) -> str:
    """Stop the engine of a decode replica for `STOPPED_S` (SIGSTOP); the replica keeps running."""
    victim = _one(app, "decode", number)
    _stop([process for process in _family(victim["pid"]) if is_engine(process)])
    return str(victim["replica_id"])


def _stop(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.suspend()

    def resume() -> None:
        for process in processes:
            if process.is_running():
                process.resume()

    timer = threading.Timer(STOPPED_S, resume)
    timer.daemon = True
    timer.start()


def kill_gateway(app: App, number: int) -> str:
    """Kill a gateway (SIGKILL); clients resume their streams (docs/resume.md)."""
    os.kill(app.status()["gateway"]["pid"], signal.SIGKILL)
    return ""


def kill_store(app: App, number: int) -> str:
    """Kill a machine's StoreNode (SIGKILL)."""
    nodes = app.status()["store"]
    os.kill(nodes[number % len(nodes)]["pid"], signal.SIGKILL)
    return ""


def kill_store_replica(app: App, number: int) -> str:
    """Kill the replica of the deployment store, which restarts StoreNodes (SIGKILL)."""
    raylet = psutil.Process(_one(app, "decode", number)["pid"]).parent()
    for process in raylet.children() if raylet else ():
        if "ServeReplica" in process.name() and process.name().endswith(":store"):
            process.kill()
            return ""
    raise RuntimeError("no process is a replica of the deployment store")


def fill_disk(app: App, number: int) -> str:
    """Prevent a StoreNode from writing any file for `FULL_S` (EFBIG in place of ENOSPC)."""
    nodes = app.status()["store"]
    node = psutil.Process(nodes[number % len(nodes)]["pid"])
    before = node.rlimit(psutil.RLIMIT_FSIZE)
    node.rlimit(psutil.RLIMIT_FSIZE, (0, before[1]))
    time.sleep(FULL_S)
    if node.is_running():
        node.rlimit(psutil.RLIMIT_FSIZE, before)
    return ""


def slow_prefill(app: App, number: int) -> str:
    """Give a prefill replica and its engine a fifth of the time for `SLOW_S`."""
    family = _family(_one(app, "prefill", number)["pid"])
    over_s = time.monotonic() + SLOW_S
    try:
        while time.monotonic() < over_s:
            for process in family:
                process.suspend()
            time.sleep(HELD_S)
            for process in family:
                process.resume()
            time.sleep(RUNS_S)
    except psutil.NoSuchProcess:
        pass
    return ""


def cut_links(app: App, number: int) -> str:
    """Reset every connection of a gateway: those of clients, those to replicas, and those on which
    replicas report their blocks. This needs root, and `ss` of iproute2."""
    gateway = psutil.Process(app.status()["gateway"]["pid"])
    for link in gateway.net_connections("tcp"):
        if link.status == psutil.CONN_ESTABLISHED and link.raddr:
            ends = [
                part
                for side, at in (("src", link.laddr), ("dst", link.raddr))
                for part in (side, f"{at.ip}:{at.port}")
            ]
            subprocess.run(["ss", "-K", "-t", *ends], check=True, stdout=subprocess.DEVNULL)
    return ""


def drain(app: App, number: int) -> str:
    """Remove a decode replica, and add one again when it has stopped."""
    served, count = app.served, app.replicas["decode"]
    assert served is not None
    served.deploy({"decode": {"num_replicas": count - 1}})
    deadline = time.monotonic() + BACK_S
    while served.count("decode") >= count or served.count("decode", "STOPPING"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no replica had gone after {BACK_S:g} s")
        time.sleep(0.5)
    served.deploy({"decode": {"num_replicas": count}})
    return ""


def redeploy(app: App, number: int) -> str:
    """Deploy another configuration, for which Serve replaces replicas of all deployments."""
    served = app.served
    assert served is not None
    before = {each["replica_id"] for each in app.status()["replicas"]}
    served.args["router"] = {"retry_max_s": 60 + number}
    served.deploy()
    deadline = time.monotonic() + 2 * BACK_S
    while before & {each["replica_id"] for each in app.status()["replicas"]}:
        if time.monotonic() > deadline:
            raise RuntimeError(f"old replicas are there after {2 * BACK_S:g} s")
        time.sleep(1.0)
    return ""


FAULTS: dict[str, Callable[[App, int], str]] = {
    "kill_decode": kill_decode,
    "kill_engine": kill_engine,
    "stop_decode": stop_decode,
    "kill_prefill": kill_prefill,
    "kill_store": kill_store,
    "kill_store_replica": kill_store_replica,
    "fill_disk": fill_disk,
    "slow_prefill": slow_prefill,
    "cut_links": cut_links,
    "kill_gateway": kill_gateway,
    "drain": drain,
    "redeploy": redeploy,
}
"""Faults by name; each breaks one thing. It returns the decode or prefill replica that it hit, if
it hit one. The number picks which."""
BY_REPLICA = frozenset({"kill_decode", "kill_engine", "stop_decode"})
"""Faults that cut the streams of the replica that they hit."""
OF_CLUSTERS = frozenset({"kill_gateway", "drain", "redeploy"})
"""Faults that need several replicas and gateways."""
