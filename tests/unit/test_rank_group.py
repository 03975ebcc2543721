"""Tensor-parallel ranks of an engine compare values in host memory."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_engine.rank_group import RankGroup

RANKS = 2


def values(rank: int) -> Any:
    return np.random.default_rng(rank).normal(size=(30, 1000)).astype(np.float32)


def compare(rank: int, folder: str, queue: Any) -> None:
    """One of the ranks, in a process of its own."""
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{folder}/store", world_size=RANKS, rank=rank)
    ranks = RankGroup(dist.group.WORLD)
    found = ranks.union({"b"} if rank else {"z"}, ["a", "b", "c"])
    queue.put((rank, found, ranks.union(set(), ["a"]), ranks.mean(values(rank)).tobytes()))
    dist.destroy_process_group()


@pytest.mark.slow
def test_all_ranks_get_one_union_and_one_mean(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=compare, args=(n, str(tmp_path), queue)) for n in range(RANKS)]
    for each in ranks:
        each.start()
    found = sorted(queue.get(timeout=120) for _ in ranks)
    for each in ranks:
        each.join(60)
    assert [each[:3] for each in found] == [(n, {"b"}, set()) for n in range(RANKS)]
    means = {each[3] for each in found}
    assert len(means) == 1, "the same bits"
    [mean] = means
    wanted = np.mean([values(n) for n in range(RANKS)], 0)
    assert np.frombuffer(mean, np.float32) == pytest.approx(wanted.ravel(), abs=1e-6)


def test_one_rank_compares_nothing() -> None:
    mine = values(0)
    assert RankGroup().union({"b", "z"}, ["a", "b"]) == {"b"}
    assert RankGroup().mean(mine) is mine
