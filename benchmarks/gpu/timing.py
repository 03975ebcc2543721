"""CUDA graphs, and how long they take on the card. On a CPU, where a dry run is, calls and their
times."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for all work on the card."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give torch's unused memory back to the card."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def graph(function: Callable[[], None]) -> Callable[[], None] | None:
    """A CUDA graph of a function; None, and the reason printed, if its kernel is not here."""
    try:
        for _ in range(3 if DEVICE == "cuda" else 1):
            function()
        if DEVICE == "cpu":
            return function
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
    except (ImportError, NotImplementedError) as error:
        print(f"left out: {error}")
        return None
    replay: Callable[[], None] = graph.replay
    return replay


def milliseconds(function: Callable[[], None]) -> float:
    """Return the milliseconds on the card from the start of the function's first work to the end of
    its last."""
    if DEVICE == "cpu":
        began_s = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - began_s)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))
