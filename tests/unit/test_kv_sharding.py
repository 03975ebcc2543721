"""Which parts of a layer each rank has, and who writes them."""

from __future__ import annotations

import pytest

from headrace_kvstore.blocks.sharding import HeadSharding, Shard, heads_are_contiguous


def test_heads_are_shared_out_in_order() -> None:
    parts = HeadSharding.of(8, 2, heads_contiguous=True)
    assert [parts.shard(rank) for rank in range(2)] == [Shard(8, 0, 4), Shard(8, 4, 4)]
    assert [parts.writer(rank) for rank in range(2)] == [0, 1]
    assert (parts.copies, parts.writers) == (1, 2)


def test_a_head_that_several_ranks_have_is_written_by_the_lowest() -> None:
    parts = HeadSharding.of(2, 8, heads_contiguous=True)
    assert [parts.shard(rank).first for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [parts.writer(rank) for rank in range(8)] == [0, None, None, None, 1, None, None, None]
    assert parts.writers == 2


def test_the_parts_of_engines_of_any_size_are_the_same_where_heads_lie_apart() -> None:
    assert {HeadSharding.of(4, ranks, heads_contiguous=True).parts for ranks in (1, 2, 4, 8)} == {4}
    assert [HeadSharding.of(4, ranks, heads_contiguous=False).parts for ranks in (1, 2, 4, 8)] == [
        1,
        2,
        4,
        4,
    ]


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 32])
def test_each_part_is_written_once_and_held_by_as_many_ranks(
    heads: int, ranks: int, apart: bool
) -> None:
    parts = HeadSharding.of(heads, ranks, apart)
    written, held = [], []
    for rank in range(ranks):
        mine = parts.shard(rank)
        assert mine.parts == parts.parts
        numbers = list(range(mine.first, mine.first + mine.count))
        held += numbers
        written += numbers if parts.writer(rank) is not None else []
    assert sorted(written) == list(range(parts.parts))
    assert all(held.count(part) == parts.copies for part in range(parts.parts))
    writers = [parts.writer(rank) for rank in range(ranks) if parts.writer(rank) is not None]
    assert writers == list(range(parts.writers))


def test_ranks_that_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="6 parts of a layer cannot be shared by 4"):
        HeadSharding.of(6, 4, heads_contiguous=True)


def test_vllm_s_layouts_say_whether_a_head_s_tokens_lie_together() -> None:
    assert [heads_are_contiguous(name) for name in ("LBHNC", "LHBNC", "BLHNC", "BHLNC")] == [
        True
    ] * 4
    assert [heads_are_contiguous(name) for name in ("LBNHC", "BLNHC", None, "")] == [False] * 4
