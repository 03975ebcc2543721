"""A CUDA stream beside the computing one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """A stream whose work runs beside that of the current stream. On a CPU, work runs at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """Queue work that begins after all that the current stream has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Have later work of the current stream begin after all work queued here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
