"""Loads of a step's KV, layer by layer, under the computation of that step.

Layer l's attention needs layer l's KV only, so the step may begin when the first layer is there:

    total = max(load, compute) + load of one layer        instead of        load + compute

`DEPTH` layers are on their way at once. By Little's law, keeping up with the computation takes
(seconds from asking for a layer to having it) / (seconds to compute a layer) of them. More layers
only cost memory in which bytes wait; fewer leave the tier idle during its own latency.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from headrace_kvstore.device.clock import Clock, HostClock

DEPTH = 8
"""A depth fitted to measured times was no faster: docs/kvstore-measurements.md, `overlap`."""


class LayerSource(Protocol):
    """Source of a step's KV. Both calls are made in the loader's thread, in layer order."""

    def begin(self, layer: int) -> None:
        """Ask for a layer; must not wait for it."""
        ...

    def end(self, layer: int) -> None:
        """Wait until the layer is in the engine's cache, verified."""
        ...


class LoaderExecutor(Protocol):
    """Part of `concurrent.futures.Executor` that a pipeline uses."""

    def submit(self, call: Callable[[int], None], depth: int, /) -> Future[None]: ...


class InlineExecutor:
    """Executor that runs a pipeline in the thread that makes it."""

    def submit(self, call: Callable[[int], None], depth: int, /) -> Future[None]:
        done: Future[None] = Future()
        try:
            call(depth)
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)
        return done


class LayerPipeline:
    """One step's load, begun by its constructor.

    Args:
        sources: where the KV comes from, each for some of the blocks.
        layers: number of layers.
        threads: run the loader; one thread serves one pipeline after the other.
        depth: layers on their way at once.
        clock: of the loads.
        began: the clock's mark from which the load may begin; None: when its thread begins.

    Attributes:
        seconds: duration of the whole load; 0 until it has ended.
    """

    def __init__(
        self,
        sources: Sequence[LayerSource],
        layers: int,
        threads: LoaderExecutor,
        depth: int = DEPTH,
        clock: Clock | None = None,
        began: Any = None,
    ) -> None:
        self._clock, self._began = clock or HostClock(), began
        self._sources = sources
        self._ready = [threading.Event() for _ in range(layers)]
        self._error: BaseException | None = None
        self.seconds = 0.0
        self._done: Future[None] = threads.submit(self._run, depth)

    def wait(self, layer: int) -> None:
        """Block until a layer's KV is in place.

        Raises:
            Exception: the source's own error; no later layer will come.
        """
        self._ready[layer].wait()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait for the end of the whole load.

        Raises:
            Exception: the source's own error.
        """
        self._done.result()

    def _run(self, depth: int) -> None:
        clock, asked, layers = self._clock, 0, len(self._ready)
        began = clock.mark() if self._began is None else self._began
        try:
            for layer, ready in enumerate(self._ready):
                while asked < min(layer + depth, layers):
                    for source in self._sources:
                        source.begin(asked)
                    asked += 1
                for source in self._sources:
                    source.end(layer)
                ready.set()
            ended = clock.mark()
            clock.wait(ended)
            self.seconds = clock.seconds(began, ended) or 0.0
        except BaseException as error:
            self._error = error
            for ready in self._ready:
                ready.set()
            raise
