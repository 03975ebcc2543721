"""`headrace up` and `down` on a real Ray and Serve, with a stand-in for the engines."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from headrace.cli import cluster
from headrace.cli import state as instances
from headrace.config.key_file import KeyEntry, KeyFile, hash_of, new_key, write_keys
from headrace.observability.shared_memory import ProcessId, shm_names
from tests.support.certificates import Authority

FAKE = Path(__file__).parent / "fake_app_cli.py"
TIMEOUT_S = 240


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    model = tmp_path / "model"
    model.mkdir()
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}
    shape |= {"max_position_embeddings": 128, "architectures": ["LlamaForCausalLM"]}
    (model / "config.json").write_text(json.dumps(shape))
    paths = [os.environ["PYTHONPATH"], *(p for p in sys.path if p)]
    variables = os.environ | {
        "HEADRACE_STATE": str(tmp_path / "state"),
        "PYTHONPATH": os.pathsep.join(paths),
        "FAKE_MODEL": str(model),
    }
    yield variables
    if list(Path(variables["HEADRACE_STATE"]).glob("*.json")):  # a test failed
        headrace(variables, "down", "--all")


def command(environment: dict[str, str], *arguments: str) -> list[str]:
    out = [sys.executable, str(FAKE), *arguments]
    if arguments[0] == "up":
        out += ["--set", f"model.source={environment['FAKE_MODEL']}", "--set", "gateway.port=0"]
        out += ["--set", "ray.object_store_bytes=80000000", "--set", "ray.dashboard=false"]
        out += ["--set", "ray.fork_server=false"]  # the app of these tests imports no vLLM
    return out


@contextlib.contextmanager
def foreground(environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`headrace up` in the foreground, ready."""
    process = subprocess.Popen(
        command(environment, "up", *arguments),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready"):
                break
        else:
            raise AssertionError(process.communicate()[1])
        yield process
    finally:
        process.kill()
        process.communicate()


def started(environment: dict[str, str]) -> str:
    """The node's folder, once `headrace up` has made it."""
    file = Path(environment["HEADRACE_STATE"]) / "default.json"
    deadline = time.monotonic() + 60
    temp_dir = ""
    while not temp_dir and time.monotonic() < deadline:
        if file.exists() and file.stat().st_size:
            temp_dir = json.loads(file.read_text())["temp_dir"]
        time.sleep(0.1)
    return temp_dir


def until_gone(environment: dict[str, str], temp_dir: object) -> None:
    """Wait until nothing of an instance is left."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        states = list(Path(environment["HEADRACE_STATE"]).glob("*.json"))
        if not states and not Path(str(temp_dir)).exists() and not leftovers(temp_dir):
            return
        time.sleep(0.5)
    raise AssertionError(f"left: {leftovers(temp_dir)}, {states}, {temp_dir}")


def headrace(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(environment, *arguments),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def state(environment: dict[str, str], name: str = "default") -> dict[str, object]:
    file = Path(environment["HEADRACE_STATE"]) / f"{name}.json"
    assert file.stat().st_mode & 0o777 == 0o600
    return json.loads(file.read_text())


def leftovers(temp_dir: object) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if f"{temp_dir}/" in " ".join(process.cmdline()):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_detached_with_keys_and_tls_it_answers_until_down_and_then_nothing_is_left(
    environment: dict[str, str], tmp_path: Path
) -> None:
    authority, file, secret = Authority(tmp_path), tmp_path / "keys.yaml", new_key()
    write_keys(
        file, KeyFile(keys=[KeyEntry(name="shop", hash=hash_of(secret.encode()), tenant="shop")])
    )
    cert, key = authority.issue("server")
    files = {"api_keys_file": file, "tls_cert_file": cert, "tls_key_file": key}
    settings = [
        part for name, path in files.items() for part in ("--set", f"gateway.{name}={path}")
    ]
    done = headrace(environment, "up", "--detach", "--verbose", *settings)
    assert done.returncode == 0, done.stderr
    assert "s  starting Ray " in done.stderr, "the waterfall"
    instance = state(environment)
    endpoint = str(instance["endpoint"])
    assert endpoint.startswith("https://")
    for part in ("endpoint", endpoint, "curl ", "ready"):
        assert part in done.stdout
    with httpx.Client(base_url=endpoint, verify=authority.client()) as client:
        assert client.get("/health").status_code == 200
        asked = {"model": "m", "messages": []}
        assert client.post("/v1/chat/completions", json=asked).status_code == 401
        client.headers["authorization"] = f"Bearer {secret}"
        assert client.post("/v1/chat/completions", json=asked).status_code == 200
        assert client.get("/headrace/v1/status").status_code == 403

    again = headrace(environment, "up", "--detach", *settings)
    assert again.returncode == 1
    assert f'"default" is already running at {endpoint}' in again.stderr
    # The command line has an administrator's key of its own, and trusts the certificate.
    status = json.loads(headrace(environment, "status", "--json").stdout)
    assert status["plans"] == {"local": 3}
    assert status["shm"] in shm_names()

    done = headrace(environment, "down")
    assert done.returncode == 0, done.stderr
    assert '"default" is down' in done.stdout
    assert not Path(str(instance["temp_dir"])).exists()
    assert leftovers(instance["temp_dir"]) == []
    assert status["shm"] not in shm_names()
    assert headrace(environment, "down").stdout.strip() == "nothing is running"


@pytest.mark.slow
def test_ctrl_c_in_the_foreground_leaves_nothing(environment: dict[str, str]) -> None:
    with foreground(environment) as process:
        instance = state(environment)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert not Path(str(instance["temp_dir"])).exists()
    assert leftovers(instance["temp_dir"]) == []
    assert list(Path(environment["HEADRACE_STATE"]).glob("*.json")) == []


@pytest.mark.slow
def test_down_succeeds_if_the_process_that_talks_to_ray_crashes_and_up_ends_with_a_plain_line(
    environment: dict[str, str],
) -> None:
    with foreground(environment) as process:
        instance = state(environment)
        done = headrace(environment | {"FAKE_DRIVER": "crash"}, "down")
        assert (done.returncode, done.stdout) == (0, '"default" is down\n'), done.stderr
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors
    assert errors.splitlines()[-1] == "stopped by headrace down"
    assert "error" not in errors
    assert leftovers(instance["temp_dir"]) == []


@pytest.mark.slow
def test_down_while_up_is_starting_ends_both(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        command(environment, "up"), env=environment, stderr=subprocess.PIPE, text=True
    )
    temp_dir = started(environment)
    time.sleep(2.0)
    done = headrace(environment, "down")
    assert (done.returncode, done.stdout) == (0, '"default" is down\n'), done.stderr
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors.splitlines()[-1]) == (0, "stopped by headrace down"), errors
    until_gone(environment, temp_dir)


@pytest.mark.slow
def test_on_a_joined_cluster_the_app_is_deleted_and_the_cluster_stays(
    environment: dict[str, str],
) -> None:
    spec = cluster.NodeSpec("joined", num_cpus=4, object_store_bytes=80_000_000, dashboard=False)
    node = cluster.start(spec)
    try:
        node = cluster.ensure(node, spec)
        joining = environment | cluster.auth_environment(node.temp_dir)
        address = ("--address", node.address)

        done = headrace(joining, "up", "--detach", *address)
        assert done.returncode == 0, done.stderr
        elsewhere = joining | {"HEADRACE_STATE": environment["HEADRACE_STATE"] + "-other"}
        again = headrace(elsewhere, "up", *address)
        assert again.returncode == 1
        assert 'the cluster already runs an application called "headrace"' in again.stderr
        endpoint = state(environment)["endpoint"]
        assert httpx.get(f"{endpoint}/health").status_code == 200

        done = headrace(joining, "down")
        assert (done.returncode, done.stdout) == (0, '"default" is down\n'), done.stderr
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{endpoint}/health")
        assert node.supervisor.process() is not None

        with foreground(joining, *address) as process:
            endpoint = state(environment)["endpoint"]
            process.kill()
        until_gone(environment, "/nowhere")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{endpoint}/health")
        assert node.supervisor.process() is not None
    finally:
        cluster.stop(node.matcher())


@pytest.mark.slow
def test_an_instance_on_a_cluster_that_is_gone_can_be_forgotten(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_STATE", environment["HEADRACE_STATE"])
    gone = instances.Instance(
        name="gone", token="t", phase="ready", own_node=False, address="127.0.0.1:1"
    )
    instances.create(gone)
    done = headrace(environment, "down", "--name", "gone")
    assert done.returncode == 1
    assert "no Ray cluster answers at 127.0.0.1:1: Connection refused. Try again, or" in done.stderr
    done = headrace(environment, "down", "--name", "gone", "--forget")
    assert (done.returncode, done.stdout) == (0, '"gone" is down\n'), done.stderr
    assert list(instances.instances()) == []


@pytest.mark.slow
def test_sigterm_while_starting_leaves_nothing(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        command(environment, "up"), env=environment, stderr=subprocess.PIPE, text=True
    )
    temp_dir = started(environment)
    time.sleep(2.0)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in errors
    assert not Path(temp_dir).exists()
    assert leftovers(temp_dir) == []


@pytest.mark.slow
def test_a_replica_that_cannot_start_is_reported_and_undone(environment: dict[str, str]) -> None:
    done = headrace(environment | {"FAKE_APP": "broken"}, "up")
    assert done.returncode == 1
    last = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert last == ["error: decode: RuntimeError: the engine found no sense in this"]
    assert "Traceback" not in done.stderr
    logs = Path(environment["HEADRACE_STATE"]) / "default.logs"
    assert (logs / "ray.log").exists()
    assert list((logs / "serve").glob("replica_*"))
    assert not list(Path(environment["HEADRACE_STATE"]).glob("*.json"))


WATCHING = """
import os, sys, time, psutil
from headrace.cli import state
from headrace.observability.shared_memory import ProcessId
from headrace.cli.stop_reasons import Stopped, Watch, stop_on_signals
me = ProcessId.of(psutil.Process())
instance = state.Instance(name="watched", token="t", phase="ready", supervisor=me)
state.create(instance)
watch = Watch(instance, parent=True)
try:
    with stop_on_signals(), watch:
        print("watching", flush=True)
        time.sleep(60)
except Stopped:
    print(f"stopped{watch.why}", flush=True)
"""
# A program that runs another one and waits for it.
STARTER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def watch(environment: dict[str, str], *options: str) -> subprocess.Popen[str]:
    """`STARTER` running `WATCHING`, which has begun."""
    process = subprocess.Popen(
        [*options, sys.executable, "-c", STARTER, WATCHING],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "watching\n"
    return process


def test_up_stops_when_the_process_that_started_it_is_killed(environment: dict[str, str]) -> None:
    process = watch(environment)
    process.kill()
    out, _ = process.communicate(timeout=60)
    assert out == "stopped because the process that started it has ended\n"


def test_with_nohup_up_outlives_the_process_that_started_it(environment: dict[str, str]) -> None:
    process = watch(environment, "nohup")
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    time.sleep(1.5)
    assert child.is_running()
    child.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert child.is_running()
    child.terminate()
    assert process.communicate(timeout=60)[0] == "stopped\n"


def test_up_stops_when_another_process_stops_it_and_not_when_its_state_file_is_lost(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_STATE", environment["HEADRACE_STATE"])
    process = watch(environment)
    instance = instances.load("watched")
    assert instance is not None
    instances.remove("watched", "t")
    time.sleep(1.5)
    assert process.poll() is None
    instance.stopper = ProcessId.of(psutil.Process())
    instances.create(instance)
    assert process.communicate(timeout=60)[0] == "stopped\n"
