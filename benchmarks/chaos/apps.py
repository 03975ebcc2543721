"""The apps that are broken: the laptop's, or a cluster's as Serve deploys it."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from benchmarks.instance import headrace
from headrace.cli import state
from tests.support import compiled, run
from tests.support.served import MODEL, ServedApp, free_port, tiny_args

BACK_S = 240.0

Status = Mapping[str, Any]


class App:
    """A running app.

    Args:
        url: of the gateways. model: its name.
        replicas: how many there should be of each role. gateways: likewise.
        served: changes what Serve has deployed; None where nobody does.
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
        """The status document; asked again while processes come and go."""
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


@contextlib.contextmanager
def laptop(model: str | None) -> Iterator[App]:
    """One replica of each role and one gateway, by `headrace up`."""
    name = f"chaos-{uuid.uuid4().hex[:6]}"
    sets = ["gateway.port=0", *([f"model.source={model}"] if model else [])]
    try:
        headrace("up", "--detach", "--name", name, *(f"--set={one}" for one in sets))
        instance = state.load(name)
        if instance is None:
            raise RuntimeError("headrace up left no state file")
        yield App(instance.endpoint, instance.model, {"prefill": 1, "decode": 1}, 1)
    finally:
        headrace("down", "--name", name, check=False)


@contextlib.contextmanager
def cluster() -> Iterator[App]:
    """Two gateways, two prefill and three decode replicas of a random tiny model."""
    run.begin()
    compiled.keep_compiled()
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    args = tiny_args(free_port())
    args["decode"]["replicas"] = 3
    args["gateway"]["replicas"] = 2  # the chart has Serve start as many again, for upgrades
    # Below DRAM, which is too small on purpose: blocks are written and read all the time.
    args["store"] |= {"nvme_folder": str(run.folder() / "nvme"), "nvme_gb": 0.25}
    with ServedApp(args) as served:
        app = App(served.url, MODEL, {"prefill": 2, "decode": 3}, 2, served)
        app.wait_whole("")
        yield app
