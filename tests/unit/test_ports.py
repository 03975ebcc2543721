"""Blocks of ports: found free, and reserved until an engine listens there."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from headrace_engine.kv_transfer import ports
from headrace_engine.kv_transfer.ports import free_port_block, reserve_ports
from headrace_kvstore.protocol.address import bind, host_port
from tests.support.free_ports import is_free
from tests.support.only_ipv6 import HOSTS


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_block_holds_no_port_that_is_taken(host: str) -> None:
    base = free_port_block(3, host, random.Random(1))
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        taken.bind((host, base + 1))
        taken.listen()
        assert not is_free(base + 1, host)
        other = free_port_block(3, host, random.Random(1))
        assert base + 1 not in range(other, other + 3)


def test_where_nothing_is_free_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_bound", lambda host, port: None)
    with pytest.raises(OSError, match="no 2 consecutive free ports"):
        free_port_block(2, "127.0.0.1")


def test_an_address_of_another_machine_is_named_as_such() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        reserve_ports(1, "192.0.2.1")


def test_engines_that_start_at_once_get_ports_of_their_own(host: str) -> None:
    """All draw the same random numbers, so that they meet at each port."""
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: reserve_ports(3, host, random.Random(7)), range(16)))
    try:
        held = {port for block in made for port in range(block.first, block.first + 3)}
        assert len(held) == 16 * 3
        assert not any(is_free(port, host) for port in held)
    finally:
        for block in made:
            block.release()
    assert all(is_free(port, host) for port in held)


def test_one_listener_takes_a_reserved_port_and_no_second_one(host: str) -> None:
    context = zmq.Context()
    with reserve_ports(2, host) as block:
        endpoint = f"tcp://{host_port(host, block.first)}"
        engine, other, client = (context.socket(kind) for kind in (zmq.REP, zmq.REP, zmq.REQ))
        assert bind(engine, endpoint).endswith(f":{block.first}")
        with pytest.raises(zmq.ZMQError, match="in use"):
            bind(other, endpoint)
        client.setsockopt(zmq.IPV6, 1)
        client.connect(endpoint)
        client.send(b"hello")
        assert engine.recv() == b"hello"
    context.destroy(0)


def test_a_reservation_ends_with_its_process() -> None:
    code = (
        "from headrace_engine.kv_transfer.ports import reserve_ports\n"
        "block = reserve_ports(1, '127.0.0.1')\n"
        "print(block.first, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert not is_free(port, "127.0.0.1")
        process.kill()
    assert is_free(port, "127.0.0.1")
