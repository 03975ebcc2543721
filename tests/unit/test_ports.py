"""Blocks of free ports."""

from __future__ import annotations

import random
import socket

import pytest

from headrace_engine import ports


def test_a_block_holds_no_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    base = ports.free_port_block(3, "127.0.0.1", random.Random(1))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + 1))
        taken.listen()
        assert not ports.is_free(base + 1, "127.0.0.1")
        other = ports.free_port_block(3, "127.0.0.1", random.Random(1))
        assert base + 1 not in range(other, other + 3)


def test_where_nothing_is_free_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "is_free", lambda port, host: False)
    with pytest.raises(OSError, match="no 2 consecutive free ports"):
        ports.free_port_block(2, "127.0.0.1")
