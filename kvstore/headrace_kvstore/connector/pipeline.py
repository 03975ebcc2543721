"""Loading a step's KV layer by layer under the computation of that step.

Layer l's attention needs layer l's KV only, so the step may begin when the first layer is there:

    total = max(load, compute) + load of one layer        instead of        load + compute

`depth` layers are on their way at once. Deeper than needed costs nothing but memory where bytes
wait in between; shallower leaves the tier idle during its own latency. By Little's law the reads in
flight that keep up with the computation are

    depth = ceil(seconds from asking for a layer to having it / seconds to compute a layer)
"""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

MAX_DEPTH = 8
_SMOOTHING = 0.2


class LayerSource(Protocol):
    """Where a step's KV comes from. Both calls are made in the loader's thread, in layer order."""

    def begin(self, layer: int) -> None:
        """Ask for a layer; must not wait for it."""
        ...

    def end(self, layer: int) -> None:
        """Wait until the layer is in the engine's cache, verified."""
        ...


def choose_depth(load_s: float, compute_s: float, limit: int = MAX_DEPTH) -> int:
    """Layers to have on their way.

    Args:
        load_s: seconds from asking for a layer to having it.
        compute_s: seconds between two layers' attention.
    """
    if compute_s <= 0:
        return limit
    return max(1, min(limit, math.ceil(load_s / compute_s)))


class DepthFit:
    """Smoothed seconds a layer of loading and of computing, and the depth that follows."""

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self.load_s = self.compute_s = 0.0

    @property
    def depth(self) -> int:
        return self._fixed or choose_depth(self.load_s, self.compute_s)

    def loaded(self, seconds: float) -> None:
        self.load_s = _smooth(self.load_s, seconds)

    def computed(self, seconds: float) -> None:
        self.compute_s = _smooth(self.compute_s, seconds)


class LayerPipeline:
    """One step's load, begun by its constructor.

    Args:
        source: where the KV comes from.
        layers: how many.
        threads: runs the loader; one thread serves one pipeline after the other.
        fit: what depth to take, and where measured seconds go.
        most: what the source can have on its way.

    Attributes:
        seconds: that the whole load took; 0 until it has ended.
    """

    def __init__(
        self,
        source: LayerSource,
        layers: int,
        threads: ThreadPoolExecutor,
        fit: DepthFit,
        most: int = MAX_DEPTH,
    ) -> None:
        self._source, self._layers, self._fit = source, layers, fit
        self._ready = [threading.Event() for _ in range(layers)]
        self._resumed_at: float | None = None
        self._error: BaseException | None = None
        self.seconds = 0.0
        self._done: Future[None] = threads.submit(self._run, min(fit.depth, most))

    def wait(self, layer: int) -> None:
        """Block until a layer's KV is in place.

        Raises:
            Exception: what the source raised; no later layer will come.
        """
        if self._resumed_at is not None:
            self._fit.computed(time.perf_counter() - self._resumed_at)
        self._ready[layer].wait()
        if self._error is not None:
            raise self._error
        self._resumed_at = time.perf_counter()

    def finish(self) -> None:
        """Wait for the end of the whole load.

        Raises:
            Exception: what the source raised.
        """
        self._done.result()

    def _run(self, depth: int) -> None:
        begun: list[float] = []
        try:
            for layer in range(self._layers):
                while len(begun) < min(layer + depth, self._layers):
                    begun.append(time.perf_counter())
                    self._source.begin(len(begun) - 1)
                self._source.end(layer)
                self._fit.loaded(time.perf_counter() - begun[layer])
                self._ready[layer].set()
            self.seconds = time.perf_counter() - begun[0]
        except BaseException as error:
            self._error = error
            for event in self._ready:
                event.set()
            raise


def _smooth(old: float, new: float) -> float:
    return new if old == 0 else old + _SMOOTHING * (new - old)
