"""Hosts and ports as text, and the sockets that reach them."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import zmq

from headrace_kvstore.protocol import address
from headrace_kvstore.protocol.address import bind, connect, family, host_port, split_host_port
from tests.support.only_ipv6 import HOSTS


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("10.0.0.1", "10.0.0.1:80"),
        ("fd00::1", "[fd00::1]:80"),
        ("[fd00::1]", "[fd00::1]:80"),
        ("fe80::1%eth0", "[fe80::1%eth0]:80"),
        ("node-1.example", "node-1.example:80"),
    ],
)
def test_a_host_and_a_port_are_one_text_and_back(host: str, text: str) -> None:
    assert host_port(host, 80) == text
    assert split_host_port(text) == (host.strip("[]"), 80)


@pytest.mark.parametrize(
    "wrong", ["", "a", "a:", ":80", "a:b", "a:-1", "a:65536", "::1:80", "fd00::1", "[]:80", "a:²"]
)
def test_what_is_no_host_and_port_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|65535"):
        split_host_port(wrong)


def test_a_name_is_reached_as_this_machine_can(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[int, list[socket.AddressFamily]] = {}

    def look_up(host: str, port: object, *, type: int, flags: int) -> list[Any]:
        if not known.get(flags):
            raise socket.gaierror("unknown")
        return [(each,) for each in known[flags]]

    monkeypatch.setattr(address.socket, "getaddrinfo", look_up)
    both = [socket.AF_INET6, socket.AF_INET]
    known.update({socket.AI_ADDRCONFIG: both, 0: both})
    assert family("node") == socket.AF_INET
    known[socket.AI_ADDRCONFIG] = [socket.AF_INET6]
    assert family("node") == socket.AF_INET6, "a machine without IPv4"
    known[socket.AI_ADDRCONFIG] = []
    assert family("node") == socket.AF_INET, "a machine with a loopback address alone"
    known[0] = []
    assert family("node") == socket.AF_INET, "ZeroMQ then says what is wrong"
    assert family("fe80::1%eth0") == socket.AF_INET6 and family("10.0.0.1") == socket.AF_INET


@pytest.mark.parametrize(
    ("at", "reached"),
    [
        ("tcp://127.0.0.1:*", ["127.0.0.1"]),
        ("tcp://[::1]:*", ["::1"]),
        ("tcp://*:*", ["127.0.0.1", "::1"]),
        ("tcp://[::]:*", ["127.0.0.1", "::1"]),
        ("tcp://0.0.0.0:*", ["127.0.0.1"]),
    ],
)
def test_a_socket_is_reached_where_it_is_bound(at: str, reached: list[str]) -> None:
    if ":" in at.removeprefix("tcp:").removesuffix(":*") and "::1" not in HOSTS:
        pytest.skip("this machine has no IPv6")
    context = zmq.Context()
    try:
        server = context.socket(zmq.REP)
        port = bind(server, at).rpartition(":")[2]
        for host in {*reached} & {*HOSTS}:
            client = context.socket(zmq.REQ)
            client.setsockopt(zmq.LINGER, 0)
            connect(client, f"tcp://{host_port(host, port)}")
            client.send(b"hello")
            assert server.poll(5000), f"{host} does not reach {at}"
            server.send(server.recv())
            assert client.recv() == b"hello"
    finally:
        context.destroy(0)


def test_without_ipv6_all_addresses_are_those_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    context = zmq.Context()
    try:
        taken = context.socket(zmq.REP)
        monkeypatch.setattr(address.socket, "has_dualstack_ipv6", lambda: False)
        assert bind(taken, "tcp://*:*").startswith("tcp://0.0.0.0:")
        other = context.socket(zmq.REP)
        monkeypatch.setattr(address.socket, "has_dualstack_ipv6", lambda: True)
        with pytest.raises(zmq.ZMQError, match="in use"):
            bind(other, f"tcp://*:{taken.get_string(zmq.LAST_ENDPOINT).rpartition(':')[2]}")
    finally:
        context.destroy(0)
