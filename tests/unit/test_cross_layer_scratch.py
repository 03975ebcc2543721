"""The memory that layers mix KV in is known before the first request."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from headrace_prefill.cross_layer.engine.blocks import Mixer
from headrace_prefill.cross_layer.engine.device.scratch import Scratch

CPU, EMPTY = torch.device("cpu"), torch.tensor([])
LAYERS = 15


def test_while_there_is_no_cache_one_layers_part_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    whole = torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, **_: taken.append(n) or whole(0))
    scratch = Scratch(LAYERS, lambda device: 1600)
    scratch.prepare(EMPTY, CPU)
    assert taken == [100], "15 layers' caches of 100 bytes fit beside it"
    assert scratch._memory is None


@pytest.mark.parametrize("usable", [None, lambda device: -5])
def test_where_vllm_is_told_its_cache_or_has_no_room_nothing_is_counted(usable: object) -> None:
    scratch = Scratch(LAYERS, usable)  # type: ignore[arg-type]
    scratch.prepare(EMPTY, CPU)
    assert scratch.expected_bytes(CPU) == 0


def test_with_the_cache_it_is_taken_once_and_never_grows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    scratch, cache = Scratch(LAYERS), torch.zeros(8, 2, 16, 8)
    scratch.prepare(cache, CPU)
    memory = scratch.of(cache)
    assert memory.numel() == cache.numel() and scratch.of(cache) is memory
    assert caplog.text.count("beside the KV cache") == 1


def test_a_cpu_mixes_in_memory_that_is_there_at_the_start() -> None:
    mixer, cache = Mixer(), torch.randn(6, 2, 4, 8)
    mixer.reserve(EMPTY)
    mixer.reserve(cache)
    memory, weight = mixer._memory, torch.ones(2, 4, 8)
    found = mixer.mix(cache, cache, np.arange(6), weight, weight)
    torch.testing.assert_close(found, 2 * cache)
    assert mixer._memory is memory
