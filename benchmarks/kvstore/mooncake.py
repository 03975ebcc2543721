"""The arena against Mooncake's store: the same blocks, the same machine, in turns.

Ours goes from an engine's cache into the arena and back, through the worker half, with checksums.
Mooncake has no arena that engines map; these are its ways on one machine, all with its zero-copy
batch calls on registered memory, TCP transport, memcpy for what is local:
    one_process: a client inside the engine gets what it put itself; another engine cannot so
    two_processes: what one engine's client put, another engine's client gets
    standalone: two engines beside one standalone client, which copies between its memory and a
        pool that it shares with each; from and to the engine's cache goes one copy more
    pool: as standalone without that copy, as if an engine's cache could stand in Mooncake's pool
    checked: as one_process with Mooncake's checksums on (off elsewhere, as they are by default)
Each with the faster of two shapes of call (see `mooncake_node`).

The store's job is that one process puts what another gets. So `mooncake.get_ratio` and
`mooncake.put_ratio`, our bandwidth over Mooncake's, are those of the better of two_processes and
standalone, by the seconds of one put and one get; the others stand beside them.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.kvstore.child import Child, stop
from benchmarks.kvstore.mooncake_package import VERSION, install, library_path
from benchmarks.kvstore.stage import BLOCKS, LAYERS, Stage
from benchmarks.kvstore.timing import CannotRun, Figures, ratios, seconds, take_turns
from headrace_engine.kv_transfer.ports import free_port_block

ROUNDS, QUICK_ROUNDS = 12, 3
START_S = 1.0
HOST = "127.0.0.1"
SHAPES = ("layers", "whole")
SHARED = ("two_processes", "standalone")
"""Ways in which one process gets what another put."""
Times = dict[str, list[float]]


def measure(figures: Figures, quick: bool = False) -> None:
    rounds = QUICK_ROUNDS if quick else ROUNDS
    ways: dict[str, tuple[Times, Times]] = {}
    with tempfile.TemporaryDirectory() as folder, Stage() as stage:
        system = System(Path(folder), stage)
        ways |= _embedded(system, stage, rounds)
        ways |= _standalone(system, stage, rounds)
        ways |= _checked(system, stage, rounds)
        figures.note(
            "mooncake",
            f"version {VERSION}, its CPU wheel; {BLOCKS} blocks of {LAYERS} x "
            f"{stage.layout.layer_bytes:,} bytes; protocol tcp on loopback, P2PHANDSHAKE, "
            "registered memory, batch_put_from / batch_get_into or their multi_buffers form, "
            "MC_STORE_MEMCPY=1, client metrics off; ours verifies checksums",
        )
        report(figures, ways, stage.size_bytes)


def report(figures: Figures, ways: Mapping[str, tuple[Times, Times]], size_bytes: int) -> None:
    """Figures from each way's times of puts and of gets: of ours, and of Mooncake's shapes."""
    costs_s: dict[str, float] = {}
    for way, both in ways.items():
        costs_s[way] = 0.0
        for what, times in zip(("put", "get"), both, strict=True):
            ours = times["ours"]
            shapes = {shape: taken for shape, taken in times.items() if shape != "ours"}
            best = min(shapes, key=lambda shape: statistics.median(shapes[shape]))
            costs_s[way] += statistics.median(shapes[best])
            figures.bandwidth(f"mooncake.{way}.{what}_gb_s", size_bytes, shapes[best])
            figures.bandwidth(f"mooncake.{way}.our_{what}_gb_s", size_bytes, ours)
            figures.add(f"mooncake.{way}.{what}_ratio", ratios(shapes[best], ours))
    best = min(SHARED, key=lambda way: costs_s[way])
    for what in ("get", "put"):
        name = f"mooncake.{best}.{what}_ratio"
        figures.values[f"mooncake.{what}_ratio"] = figures.values[name]
        figures.quartiles[f"mooncake.{what}_ratio"] = figures.quartiles[name]


def _embedded(system: System, stage: Stage, rounds: int) -> dict[str, tuple[Times, Times]]:
    with system.master() as master:
        owner = system.node(master=master, segment_bytes=2 * stage.size_bytes)
        other = system.node(master=master, segment_bytes=0)
        _check(owner, other)
        arms: dict[str, Callable[[], float]] = {**_ours(stage)}
        for shape in SHAPES:
            arms[f"put {shape}"] = _put(owner, shape)
            arms[f"get {shape}"] = _do(owner, "get", shape)
            arms[f"other {shape}"] = _do(other, "get", shape)
        times = take_turns(arms, rounds)
    puts = _chosen(times, "put")
    return {
        "one_process": (puts, _chosen(times, "get")),
        "two_processes": (puts, {**_chosen(times, "other"), "ours": times["get ours"]}),
    }


def _standalone(system: System, stage: Stage, rounds: int) -> dict[str, tuple[Times, Times]]:
    with system.master() as master, system.standalone(master, 2 * stage.size_bytes) as address:
        writer = system.node(standalone=address, segment_bytes=0)
        reader = system.node(standalone=address, segment_bytes=0)
        _check(writer, reader)
        arms: dict[str, Callable[[], float]] = {**_ours(stage)}
        for shape in (*SHAPES, "pool"):
            arms[f"put {shape}"] = _put(writer, shape)
            arms[f"get {shape}"] = _do(reader, "get", shape)
        times = take_turns(arms, rounds)
    whole = _chosen(times, "put"), _chosen(times, "get")
    pools = [each.pop("pool") for each in whole]
    return {
        "standalone": whole,
        "pool": (
            {"pool": pools[0], "ours": times["put ours"]},
            {"pool": pools[1], "ours": times["get ours"]},
        ),
    }


def _checked(system: System, stage: Stage, rounds: int) -> dict[str, tuple[Times, Times]]:
    with system.master() as master:
        owner = system.node(
            {"MOONCAKE_STORE_CHECKSUM": "1"}, master=master, segment_bytes=2 * stage.size_bytes
        )
        _check(owner, owner)
        arms: dict[str, Callable[[], float]] = {**_ours(stage)}
        for shape in SHAPES:
            arms[f"put {shape}"] = _put(owner, shape)
            arms[f"get {shape}"] = _do(owner, "get", shape)
        times = take_turns(arms, max(3, rounds // 3))
    return {"checked": (_chosen(times, "put"), _chosen(times, "get"))}


def _ours(stage: Stage) -> dict[str, Callable[[], float]]:
    def put() -> float:
        stage.forget()
        return seconds(stage.save)

    stage.forget()
    stage.save()
    return {"put ours": put, "get ours": lambda: seconds(stage.load)}


def _put(node: Child, shape: str) -> Callable[[], float]:
    def put() -> float:
        node.do("forget")
        return float(node.do("put", shape=shape))

    return put


def _do(node: Child, action: str, shape: str) -> Callable[[], float]:
    return lambda: float(node.do(action, shape=shape))


def _chosen(times: Times, what: str) -> Times:
    """Times of the arms called `what SHAPE`, by shape."""
    return {name.split()[1]: taken for name, taken in times.items() if name.split()[0] == what}


def _check(writer: Child, reader: Child) -> None:
    """Raise RuntimeError unless the reader gets the writer's bytes."""
    writer.do("fill")
    writer.do("put", shape="layers")
    reader.do("wipe")
    reader.do("get", shape="layers")
    reader.do("check")
    reader.do("fill")


class System:
    """Starts Mooncake's processes. Clients end before the program that was started before them."""

    def __init__(self, folder: Path, stage: Stage) -> None:
        self._home, self._folder, self._stage = install(), folder, stage
        self._nodes: list[Child] = []
        self._environment = {
            **os.environ,
            "LD_LIBRARY_PATH": library_path(),
            "PYTHONPATH": str(self._home),
            "MC_STORE_MEMCPY": "1",
            "MC_STORE_CLIENT_METRIC": "0",
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        }

    @contextlib.contextmanager
    def master(self) -> Iterator[str]:
        """A master's address."""
        port = free_port_block(2, HOST)
        metrics = port + 1
        with self._program(
            "mooncake_master",
            *(f"--rpc_port={port}", "--rpc_address=127.0.0.1"),
            *(f"--metrics_port={metrics}", "--metrics_host=127.0.0.1"),
        ):
            yield f"127.0.0.1:{port}"

    @contextlib.contextmanager
    def standalone(self, master: str, segment_bytes: int) -> Iterator[str]:
        """A standalone client's address."""
        port = free_port_block(1, HOST)
        with self._program(
            "mooncake_client",
            *("--host=127.0.0.1", f"--port={port}", "--protocol=tcp"),
            *(f"--global_segment_size={segment_bytes >> 20}MB", "--metadata_server=P2PHANDSHAKE"),
            f"--master_server_address={master}",
        ):
            yield f"127.0.0.1:{port}"

    def node(self, environment: Mapping[str, str] | None = None, **options: Any) -> Child:
        """Return a client process.

        Raises:
            CannotRun: Mooncake does not start here.
        """
        options |= {
            "layers": LAYERS,
            "blocks": len(self._stage.hashes),
            "layer_bytes": self._stage.layout.layer_bytes,
        }
        environment = {**self._environment, **(environment or {})}
        node = Child("mooncake_node", options, environment, self._folder / "log")
        self._nodes.append(node)
        try:
            node.answer()
        except RuntimeError as error:
            raise CannotRun(f"no client of Mooncake's store: {error}") from error
        return node

    @contextlib.contextmanager
    def _program(self, name: str, *options: str) -> Iterator[None]:
        command = [str(self._home / "mooncake" / name), *options]
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            time.sleep(START_S)
            if process.poll() is not None:
                raise CannotRun(f"{name} ended with {process.returncode}")
            yield
        finally:
            for node in self._nodes:
                node.end()
            self._nodes.clear()
            stop(process)
