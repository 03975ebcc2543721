"""CUDA graphs, and how long they take on the card."""

from __future__ import annotations

from collections.abc import Callable

import torch


def graph(function: Callable[[], None]) -> Callable[[], None] | None:
    """A CUDA graph of a function; None, and the reason printed, if its kernel is not here."""
    try:
        for _ in range(3):
            function()
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
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))
