"""The layer pipeline: what is asked for when, what a step waits for, how deep it goes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace_engine.connector.loading.layer_pipeline import LayerPipeline

LAYERS = 6


class Tier:
    """A source whose layers arrive when the test says so."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.asked: list[int] = []
        self.arrived = [threading.Event() for _ in range(LAYERS)]
        self.waits = [threading.Event() for _ in range(LAYERS)]
        self.fails_at = fails_at

    def begin(self, layer: int) -> None:
        self.asked.append(layer)

    def end(self, layer: int) -> None:
        self.waits[layer].set()
        self.arrived[layer].wait(5)
        if layer == self.fails_at:
            raise OSError("gone")

    def deliver(self, *layers: int) -> None:
        for layer in layers:
            self.arrived[layer].set()


@pytest.fixture
def threads():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_depth_layers_are_on_their_way_at_once(threads: ThreadPoolExecutor, depth: int) -> None:
    tier = Tier()
    pipeline = LayerPipeline([tier], LAYERS, threads, depth)
    tier.waits[0].wait(5)
    assert tier.asked == list(range(depth))
    tier.deliver(0)
    tier.waits[1].wait(5)
    assert tier.asked == list(range(depth + 1))
    tier.deliver(*range(LAYERS))
    pipeline.finish()
    assert tier.asked == list(range(LAYERS))


def test_a_step_waits_for_the_layer_it_needs_and_no_other(threads: ThreadPoolExecutor) -> None:
    tier = Tier()
    pipeline = LayerPipeline([tier], LAYERS, threads, 2)
    tier.deliver(0)
    pipeline.wait(0)
    waiting = threading.Thread(target=pipeline.wait, args=(1,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    tier.deliver(1)
    waiting.join(5)
    assert not waiting.is_alive()
    tier.deliver(*range(LAYERS))
    pipeline.finish()


def test_a_failed_load_reaches_the_step_and_never_hangs_it(threads: ThreadPoolExecutor) -> None:
    tier = Tier(fails_at=2)
    tier.deliver(*range(LAYERS))
    pipeline = LayerPipeline([tier], LAYERS, threads, 1)
    with pytest.raises(OSError, match="gone"):
        pipeline.wait(LAYERS - 1)
    with pytest.raises(OSError, match="gone"):
        pipeline.finish()
