"""The routers, each as it is started before the emulated engines.

Peers are not dependencies of ours. Each is a folder below the one that HEADRACE_ROUTER_PEERS names,
made by ``pip install --target``; one that is missing is left out, and `install_hint` says how to
get it. None of them reaches a network.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.routers.engines import Settings
from benchmarks.routers.processes import (
    NotStartedError,
    Program,
    free_port,
    get_json,
    running,
)
from benchmarks.routers.replica import MODEL

PEERS_VARIABLE = "HEADRACE_ROUTER_PEERS"
LIGHT = "setproctitle orjson"
_READY_S = 180.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """The running processes of one arm.

    Attributes:
        url: the URL for clients.
        router: the router's programs.
        stats: returns the statistics of each engine, as the engines' processes report them.
        engine_cpu_s: returns the CPU seconds of these processes.
    """

    url: str
    router: list[Program]
    stats: Callable[[], list[dict[str, float]]]
    engine_cpu_s: Callable[[], float]


Start = Callable[[Settings, Path, Path], AbstractContextManager[Cluster]]


@dataclass(frozen=True, slots=True)
class Arm:
    """One router.

    Attributes:
        package: the folder of a peer, and what pip calls it; empty for our own.
        rust: whether it is one of the Rust routers.
        start: brings it up with its engines; `logs` is a folder for what they write.
    """

    name: str
    package: str
    needs: str
    rust: bool
    start: Start

    def folder(self, peers: Path | None) -> Path | None:
        """Where it is installed; None if it is not."""
        if not self.package:
            return Path()
        found = None if peers is None else peers / self.package.partition("==")[0]
        return found if found is not None and found.is_dir() else None

    def install_hint(self) -> str:
        """How to get it."""
        name = self.package.partition("==")[0]
        target = f"pip install --target ${PEERS_VARIABLE}/{name}"
        return f"{target} --no-deps {self.package} && {target} {self.needs}"


def python(folder: Path) -> dict[str, str]:
    """Environment in which a peer's packages can be imported."""
    return {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}


@contextlib.contextmanager
def engines(settings: Settings, logs: Path) -> Iterator[tuple[list[str], Cluster, list[str]]]:
    """All engines in one process: their URLs, the cluster without a router, their events."""
    command = [sys.executable, "-m", "benchmarks.routers.engines", settings.to_json()]
    with running(Program(command, logs / "engines.log", talks=True)) as program:
        admin = program.told["admin"]
        urls = program.told["urls"]

        def stats() -> list[dict[str, float]]:
            told: list[dict[str, float]] = get_json(f"{admin}/emulated/stats")["engines"]
            return told

        yield urls, Cluster(urls[0], [], stats, program.cpu_s), [admin, *program.told["events"]]


@contextlib.contextmanager
def _direct(settings: Settings, folder: Path, logs: Path) -> Iterator[Cluster]:
    with engines(settings, logs) as (_, cluster, _):
        yield cluster


def _headrace(**router: float) -> Start:
    """Our gateway with these settings of its router, and the defaults of the others."""

    @contextlib.contextmanager
    def start(settings: Settings, folder: Path, logs: Path) -> Iterator[Cluster]:
        settings = replace(settings, line=True)
        with engines(settings, logs) as (urls, cluster, (admin, *_)):
            command = [sys.executable, "-m", "benchmarks.routers.gateway", admin]
            command.append(json.dumps(router))
            with running(Program(command, logs / "headrace.log", talks=True)) as program:
                url = program.told["url"]
                program.wait_until_up(f"{url}/health")
                _wait_for_plans(url, len(urls))
                yield Cluster(url, [program], cluster.stats, cluster.engine_cpu_s)

    return start


def _wait_for_plans(url: str, replicas: int) -> None:
    """Until the gateway has heard of all replicas, and its code is compiled."""
    until_s = time.monotonic() + _READY_S
    while time.monotonic() < until_s:
        told = get_json(f"{url}/headrace/v1/status")
        if f'"replicas": {replicas}' in str(told).replace("'", '"'):
            return
        time.sleep(0.5)
    raise NotStartedError(f"our gateway has not heard of {replicas} replicas: {told}")


def _rust(module: str, *flags: str) -> Start:
    """A router that comes as a wheel with a Rust program inside."""

    @contextlib.contextmanager
    def start(settings: Settings, folder: Path, logs: Path) -> Iterator[Cluster]:
        with engines(settings, logs) as (urls, cluster, _):
            port = free_port()
            command = [sys.executable, "-m", *module.split(), "--host", "127.0.0.1"]
            command += ["--port", str(port), "--worker-urls", *urls]
            command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
            command += ["--worker-startup-check-interval", "1", *flags]
            log = logs / f"{module.split('.')[0]}.log"
            with running(Program(command, log, env=python(folder))) as program:
                program.wait_until_up(f"http://127.0.0.1:{port}/v1/models")
                yield Cluster(
                    f"http://127.0.0.1:{port}", [program], cluster.stats, cluster.engine_cpu_s
                )

    return start


@contextlib.contextmanager
def _ray(settings: Settings, folder: Path, logs: Path) -> Iterator[Cluster]:
    with engines(settings, logs) as (urls, cluster, _):
        command = [sys.executable, "-m", "benchmarks.routers.ray_relay", *urls]
        with running(Program(command, logs / "ray.log", talks=True)) as program:
            url = program.told["url"]
            yield Cluster(url, [program], cluster.stats, cluster.engine_cpu_s)


@contextlib.contextmanager
def _dynamo(settings: Settings, folder: Path, logs: Path) -> Iterator[Cluster]:
    """Dynamo's frontend with its KV router. An engine and its worker are one process each, as with
    Dynamo's own engines."""
    state = logs / "dynamo"
    state.mkdir(exist_ok=True)
    local = ("TCP_RPC_HOST", "EVENT_PLANE_HOST", "TCP_RESPONSE_STREAM_HOST")
    env = {
        **{f"DYN_{name}": "127.0.0.1" for name in local},
        "PYTHONPATH": str(folder),
        "DYN_FILE_KV": str(state / "kv"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(state),
        "DYN_LOG": "warn",
    }
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
    command += ["--http-port", str(port), "--router-mode", "kv", "--discovery-backend", "file"]
    command += ["--kv-cache-block-size", str(settings.block_tokens)]
    with contextlib.ExitStack() as stack:
        frontend = stack.enter_context(
            running(Program(command, logs / "dynamo-frontend.log", env=env))
        )
        workers = []
        for number in range(settings.engines):
            worker = [sys.executable, "-m", "benchmarks.routers.dynamo_worker"]
            worker += [replace(settings, engines=1).to_json(), str(number)]
            log = logs / f"dynamo-worker-{number}.log"
            workers.append(stack.enter_context(running(Program(worker, log, env=env, talks=True))))
        _wait_for_model(frontend, url)

        def stats() -> list[dict[str, float]]:
            return [
                get_json(f"{worker.told['admin']}/emulated/stats")["engines"][0]
                for worker in workers
            ]

        yield Cluster(url, [frontend], stats, lambda: sum(worker.cpu_s() for worker in workers))


def _wait_for_model(frontend: Program, url: str) -> None:
    until_s = time.monotonic() + _READY_S
    while time.monotonic() < until_s:
        frontend.wait_until_up(f"{url}/health")
        if any(one["id"] == MODEL for one in get_json(f"{url}/v1/models").get("data", [])):
            time.sleep(3.0)  # the workers register one after the other
            return
        time.sleep(0.5)
    raise NotStartedError(f"the frontend knows no model; {frontend.last_words()}")


OURS_NAME, DIRECT = "headrace", "direct"
_CACHE_AWARE = ("--policy", "cache_aware")
ARMS = {
    arm.name: arm
    for arm in (
        Arm(OURS_NAME, "", "", False, _headrace()),
        Arm(
            *("sglang-router", "sglang-router==0.3.2", LIGHT, True),
            _rust("sglang_router.launch_router", *_CACHE_AWARE),
        ),
        Arm(
            *("smg", "smg==1.13.0", LIGHT, True),
            _rust("smg.launch_router", *_CACHE_AWARE, "--disable-tokenizer-autoload"),
        ),
        Arm(
            *("vllm-router", "vllm-router==0.1.17", LIGHT, True),
            _rust("vllm_router.launch_router", *_CACHE_AWARE),
        ),
        Arm(
            *("dynamo", "ai-dynamo==1.6.1", "", False),
            _dynamo,
        ),
        Arm("ray-policy", "", "", False, _ray),
        Arm(DIRECT, "", "", False, _direct),
    )
}
