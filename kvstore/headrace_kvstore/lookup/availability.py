"""Runs of a prompt that the KV store can supply, with their tier and their wait. Pure."""

from __future__ import annotations

from typing import NamedTuple

DRAM, NVME, REMOTE, OBJECT = MEDIA = ("dram", "nvme", "remote", "object")
"""Media, fastest first. Remote blocks and blocks in objects go into DRAM before engines load
them."""


class AvailableRun(NamedTuple):
    """A run of a prompt that the store can supply."""

    medium: str
    """One of MEDIA."""
    length: int
    """Length of the run: in blocks in a node's answer, in tokens in plans."""
    wait_s: float = 0.0
    """Predicted seconds until an engine can load the run; 0 if it can at once."""
