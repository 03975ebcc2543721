"""The apps that are broken: the laptop's, or a cluster's as Serve deploys it."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import psutil

from benchmarks.chaos.kv_faults import KvFaults
from benchmarks.instance import running_instance
from tests.support import compiled, run
from tests.support.served import MODEL, ServedApp, free_port, tiny_args

BACK_S = 240.0
GRACE_S = 4.0
"""Grace period of a drained decode replica: streams must take longer, so that they are cut."""
COLD_S = 5.0
"""Timeout of a first remote prefill. Late KV takes longer than that (`kv_faults.LATE_S`)."""

Status = Mapping[str, Any]


class App:
    """A running app.

    Args:
        url: URL of the gateways. model: its name.
        replicas: wanted number of replicas of each role.
        gateways: wanted number of gateways.
        served: changes the deployments of Serve; None if they do not change.
    """

    def __init__(
        self,
        url: str,
        model: str,
        replicas: dict[str, int],
        gateways: int,
        served: ServedApp | None = None,
    ) -> None:
        self.url, self.model, self.replicas, self.gateways = url, model, replicas, gateways
        self.served = served

    def status(self) -> Status:
        """Return the status document; retry while processes start and stop."""
        deadline = time.monotonic() + 30
        while True:
            try:
                with httpx.Client(headers={"connection": "close"}, timeout=20) as client:
                    answer = client.get(f"{self.url}/headrace/v1/status")
                return dict(answer.raise_for_status().json())
            except httpx.HTTPError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def wait_whole(self, gone: str) -> float:
        """Until as many replicas of each role, gateways and StoreNodes answer as there should be,
        without that replica; seconds.

        Raises:
            RuntimeError: they do not within `BACK_S`.
        """
        began = time.monotonic()
        while True:
            time.sleep(1.0)
            told = [self.status() for _ in range(8 * self.gateways if self.gateways > 1 else 1)]
            gateways = {each["gateway"]["pid"] for each in told}
            replicas = [each for each in told[-1]["replicas"] if each["replica_id"] != gone]
            counts = dict(Counter(str(each["role"]) for each in replicas))
            ready = all(each.get("url") for each in replicas if each["role"] == "decode")
            whole = (counts, len(gateways)) == (self.replicas, self.gateways)
            if whole and ready and told[-1]["store"]:
                return time.monotonic() - began
            if time.monotonic() - began > BACK_S:
                break
        raise RuntimeError(
            f"not all came back within {BACK_S:g} s: {counts} of {self.replicas}, {len(gateways)} "
            f"gateways of {self.gateways}, {len(told[-1]['store'])} StoreNodes, decode replicas "
            f"listen: {ready}"
        )


def is_engine(process: psutil.Process) -> bool:
    """Return whether a process is the vLLM engine of a replica."""
    try:
        return "EngineCore" in " ".join(process.cmdline() or [process.name()])
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def laptop(model: str | None) -> Iterator[App]:
    """One replica of each role and one gateway, by `headrace up`."""
    with running_instance("chaos", model=model) as instance:
        yield App(instance.endpoint, instance.model, {"prefill": 1, "decode": 1}, 1)


@contextlib.contextmanager
def cluster() -> Iterator[App]:
    """Two gateways, two prefill and three decode replicas of a random tiny model."""
    _begin()
    args = _cluster_args()
    # Below DRAM, which is too small on purpose: blocks are written and read all the time.
    args["store"] |= {"nvme_folder": str(run.folder() / "nvme"), "nvme_gb": 0.25}
    with _serving(ServedApp(args)) as app:
        yield app


@contextlib.contextmanager
def products() -> Iterator[tuple[App, KvFaults]]:
    """The same, whose prompts all come from prefill replicas, and what breaks their KV. A decode
    replica that is told to go has less time than its streams take."""
    _begin()
    faults = KvFaults(run.folder())
    os.environ |= faults.environment()
    args = _cluster_args()
    args["router"] = {"policy": "remote", "timeout_cold_s": COLD_S}
    with _serving(ServedApp(args, {"decode": {"graceful_shutdown_timeout_s": GRACE_S}})) as app:
        yield app, faults


def _begin() -> None:
    run.begin()
    compiled.keep_compiled()
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}


def _cluster_args() -> dict[str, Any]:
    args = tiny_args(free_port())
    args["decode"]["replicas"] = 3
    args["gateway"]["replicas"] = 2  # the chart has Serve start as many again, for upgrades
    return args


@contextlib.contextmanager
def _serving(starting: ServedApp) -> Iterator[App]:
    with starting as served:
        app = App(served.url, MODEL, {"prefill": 2, "decode": 3}, 2, served)
        app.wait_whole("")
        yield app
