"""Two ends of `headrace doctor` on loopback: what they measure, and what they say of each other."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli.doctor import agreement, command, link, pod
from headrace.cli.probes import describe, transfer
from headrace.cli.probes.facts import model_digest
from headrace.cli.probes.transfer import Transfer
from headrace.config import load_config

FAST = Transfer(20.0, "", 2.0, 0.01, 0.001, {})


def test_two_ends_measure_each_other_and_find_what_differs() -> None:
    """The listener is a process with another hash seed and another UCX setting."""
    listener = subprocess.Popen(
        [
            sys.executable, "-m", "headrace.cli", "doctor", "--cluster", "--listen", "0",
            "--seconds", "60", "--set", "decode.env.PYTHONHASHSEED=3",
            "--set", "decode.env.UCX_LOG_LEVEL=warn",
        ],
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_AUTH_TOKEN": "secret"},
    )  # fmt: skip
    try:
        assert listener.stderr is not None
        port = next(
            int(line.split("port ")[1].split(";")[0])
            for line in listener.stderr
            if line.startswith("listening on port")
        )
        # Whoever reaches UCX's port may read the listener's memory.
        assert b"RAY_AUTH_TOKEN" not in Path(f"/proc/{listener.pid}/environ").read_bytes()
        threading.Thread(target=listener.stderr.read, daemon=True).start()
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")  # must not end it
        done, error = transfer.measure(f"127.0.0.1:{port}", seconds=0.3)
    finally:
        listener.terminate()
        listener.wait(timeout=20)
    assert done is not None, error
    assert done.nixl_error == "" and done.nixl_gbps is not None and done.nixl_gbps > 0
    assert done.tcp_gbps > 0 and abs(done.clock_s) < 0.5
    ours = command._facts(pod.Pod("decode", load_config()))
    found = {f.found: f for f in agreement.peer(ours, done.facts)}
    assert found['"PYTHONHASHSEED" differs'].level == "FAIL"
    assert found['"UCX_LOG_LEVEL" differs'].level == "WARN"
    assert len(found) == 2


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "WAIT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        transfer.read("127.0.0.1", port, 0.1)


def test_a_peer_that_speaks_something_else_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            line, _ = server.accept()
            with line:
                line.sendall(b"x" * (transfer.MAX_LINE_BYTES + 1))
                time.sleep(0.05)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ValueError, match="protocol"):
            transfer.read("127.0.0.1", server.getsockname()[1], 0.1)
        thread.join()


def test_a_peer_that_sends_slowly_holds_the_listener_no_longer_than_it_serves() -> None:
    ports: list[int] = []
    done = threading.Thread(target=transfer.listen, args=(0, {}, 1.5, ports.append), daemon=True)
    done.start()
    while not ports:
        time.sleep(0.01)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", ports[0])) as slow, suppress(OSError):
        while done.is_alive() and time.monotonic() - began < 20:
            slow.sendall(b" ")
            time.sleep(0.05)
    done.join(10)
    assert not done.is_alive()


def test_a_link_is_judged_by_its_speed_and_by_what_it_could_be() -> None:
    def level(done: Transfer, rdma: bool) -> str:
        return link.link(done, "p:1", rdma, None)[0].level

    assert level(FAST, True) == "OK"
    assert level(replace(FAST, nixl_gbps=2.5), True) == "WARN"
    assert level(replace(FAST, nixl_gbps=2.5), False) == "OK"
    assert level(replace(FAST, nixl_gbps=0.05), False) == "WARN"
    assert level(replace(FAST, nixl_gbps=None, nixl_error="lost"), False) == "FAIL"
    # 131,072 B a token, 1,000 tokens: 131 MB, at 20 GB/s 6.6 ms.
    assert "6.6 ms" in link.link(FAST, "p:1", True, 131_072)[0].found
    assert link.link(replace(FAST, clock_s=-3.0), "p:1", True, None)[1].level == "WARN"


def test_values_of_the_environment_do_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "loud")
    facts = describe({"PYTHONHASHSEED": "0"}, None)
    assert "VLLM_API_KEY" not in facts["env"]
    assert "VLLM_LOGGING_LEVEL" in facts["env"] and "loud" not in str(facts)


@pytest.mark.parametrize(
    ("theirs", "level", "text"),
    [
        ({"versions": {"vllm": "0.29.0"}}, "FAIL", 'vllm is "0.30.0" here, "0.29.0" at the peer'),
        ({"versions": {}}, "FAIL", "not set at the peer"),
        ({"env": {"VLLM_KV_CACHE_LAYOUT": "x"}}, "FAIL", "VLLM_KV_CACHE_LAYOUT"),
        ({"driver": "580.1"}, "WARN", "driver"),
        ({"model": "b"}, "FAIL", "model's files differ"),
        ({}, "OK", "agree"),
        ({"versions": 3, "env": "x"}, "FAIL", "not set"),
    ],
)
def test_differences_between_machines(theirs: dict[str, object], level: str, text: str) -> None:
    ours = {"versions": {"vllm": "0.30.0"}, "env": {}, "driver": "590.1", "model": "a"}
    found = agreement.peer(ours, ours | theirs)
    assert [f.level for f in found] == [level]
    assert text in found[0].found and bool(found[0].remedy) == (level != "OK")


def test_a_models_digest_sees_other_weights_by_their_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"123")
    before = model_digest(tmp_path)
    (tmp_path / "README.md").write_text("x")
    assert model_digest(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    assert model_digest(tmp_path) != before
