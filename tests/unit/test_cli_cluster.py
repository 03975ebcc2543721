"""A private Ray node starts beside anything else and leaves nothing. Real Ray, no engines."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import cluster
from headrace.config.schema import MAX_TEMP_DIR_CHARS
from headrace.observability.shared_memory import shm_names

# A detached actor that survives its driver, and one that was killed, each with a segment that no
# tracker knows: what a dead engine leaves behind.
DRIVER = """
import os, sys, ray, time
ray.init(address=sys.argv[1], namespace="headrace", log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=0)
class Engine:
    def start(self):
        from multiprocessing import resource_tracker, shared_memory
        self.memory = shared_memory.SharedMemory(create=True, size=4096)
        resource_tracker.unregister(self.memory._name, "shared_memory")
        return self.memory.name, os.getpid()
    def die(self):
        os.kill(os.getpid(), 9)

engines = [Engine.options(name=n, lifetime="detached").remote() for n in ("alive", "dead")]
started = ray.get([e.start.remote() for e in engines])
time.sleep(3)
engines[1].die.remote()
time.sleep(1)
print("NAMES", *(name for name, _ in started))
"""


@pytest.fixture
def name() -> str:
    return f"t{os.getpid() % 10_000}"


def start(name: str, **settings: object) -> cluster.Node:
    spec = cluster.NodeSpec(name, num_cpus=2, object_store_bytes=80_000_000, **settings)
    node = cluster.start(spec)
    try:
        return cluster.ensure(node, spec)
    except cluster.NodeError:
        cluster.stop(node.matcher())
        raise


def gone(path: Path) -> bool:
    deadline = time.monotonic() + 30
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return not path.exists()


@pytest.fixture(scope="module")
def other() -> Iterator[cluster.Node]:
    """A node that is there beside the test's own one."""
    node = start(f"o{os.getpid() % 10_000}", dashboard=False)
    yield node
    cluster.stop(node.matcher())


@pytest.mark.slow
def test_a_node_leaves_no_process_no_folder_and_no_shm_file_and_another_one_goes_on(
    name: str, other: cluster.Node
) -> None:
    node = start(name, dashboard=False)
    try:
        assert node.address != other.address
        assert node.matcher().processes().keys().isdisjoint(other.matcher().processes())
        assert str(node.temp_dir) != str(other.temp_dir)
        assert (node.temp_dir / "ray-token").stat().st_mode & 0o777 == 0o600
        environment = os.environ | cluster.auth_environment(node.temp_dir)
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, node.address],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "NAMES" in done.stdout, done.stderr[-2000:]
        made = done.stdout.split("NAMES")[1].split()
        assert len(made) == 2
        processes = node.matcher().processes()
        assert len(processes) >= 4
    finally:
        cluster.stop(node.matcher())
    assert [i.pid for i in processes if i.process() is not None] == []
    assert node.matcher().processes() == {}
    assert not node.temp_dir.exists()
    assert shm_names().isdisjoint(made)
    cluster.stop(node.matcher())  # idempotent
    assert other.supervisor.process() is not None
    assert other.matcher().processes()


@pytest.mark.slow
def test_a_keeper_that_is_killed_leaves_its_node_to_stop(other: cluster.Node) -> None:
    supervisor = other.supervisor.process()
    assert supervisor is not None
    supervisor.kill()
    cluster.stop(other.matcher())
    assert other.matcher().processes() == {}
    assert not other.temp_dir.exists()


@pytest.mark.slow
def test_a_foreground_node_whose_starter_is_killed_leaves_nothing(
    name: str, tmp_path: Path
) -> None:
    code = (
        "import os\n"
        "from headrace.cli import cluster, state\n"
        f"spec = cluster.NodeSpec({name!r}, 2, 80_000_000, dashboard=False)\n"
        f"state.create(state.Instance({name!r}, spec.token))\n"
        "node = cluster.ensure(cluster.start(spec), spec)\n"
        "print(node.supervisor.pid, node.temp_dir, flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HEADRACE_STATE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    pid, folder = done.stdout.split()
    assert gone(tmp_path / f"{name}.json")
    assert not Path(folder).exists()
    left = {i.pid for i in cluster.ProcessMatcher("none", Path(folder)).processes()}
    assert left <= {int(pid)}  # the supervisor itself, about to end


@pytest.mark.slow
def test_a_node_that_cannot_start_says_why(name: str) -> None:
    node = cluster.start(cluster.NodeSpec(name, num_cpus=2, object_store_bytes=1, dashboard=False))
    try:
        with pytest.raises(cluster.NodeError, match=r"(?i)object store|ended while starting"):
            cluster.wait(node)
    finally:
        cluster.stop(node.matcher())
    assert not node.temp_dir.exists()


def test_free_ports_are_below_the_ephemeral_range_and_differ() -> None:
    ports = cluster.free_ports(20)
    assert len(set(ports)) == 20
    assert all(cluster.FIRST_PORT <= p < cluster.LAST_PORT for p in ports)


def test_a_port_is_given_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "FIRST_PORT", 20_000)
    monkeypatch.setattr(cluster, "LAST_PORT", 20_032)
    monkeypatch.setattr(cluster, "given_ports", {20_000})
    given = cluster.free_ports(5) + cluster.free_ports(5)
    assert len({*given, 20_000}) == 11
    with pytest.raises(cluster.NodeError):
        cluster.free_ports(40)


def test_a_used_port_is_not_free() -> None:
    import socket

    with socket.socket() as server:
        server.bind((cluster.HOST, 0))
        server.listen()
        assert not cluster.port_is_free(cluster.HOST, server.getsockname()[1])


def test_socket_paths_fit_below_the_longest_folder() -> None:
    folder = Path("/" + "x" * (MAX_TEMP_DIR_CHARS - 1)) / "hr-abcdef-12345678"
    ray = folder / "r/session_2026-11-21_03-44-39_676687_4194304/sockets/plasma_store"
    assert len(str(ray)) <= 107


def test_the_node_folder_is_short_wherever_temporary_files_go(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a-folder-with-a-long-name"))
    folder = cluster.make_temp_dir("a-name-as-long-as-names-may-be")
    try:
        assert folder.parent == Path("/tmp")
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(folder.name) == 18
    finally:
        folder.rmdir()


def test_the_token_is_private_and_made_once(tmp_path: Path) -> None:
    first = cluster.auth_environment(tmp_path)
    text = Path(first["RAY_AUTH_TOKEN_PATH"]).read_text()
    assert cluster.auth_environment(tmp_path) == first
    assert Path(first["RAY_AUTH_TOKEN_PATH"]).read_text() == text
    assert len(text) == 64
