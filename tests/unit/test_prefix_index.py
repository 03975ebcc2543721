"""Block keys and the index of what an engine holds."""

import numpy as np
import pytest

from headrace.router.replica_planner.prefix_index import PrefixIndex, chain_seed, hash_blocks

SEED = chain_seed("")


def keys(tokens: list[int], block: int = 2, seed: bytes = SEED) -> list[bytes]:
    return hash_blocks(tokens, block, seed)


def test_only_full_blocks_have_keys() -> None:
    assert keys([1]) == []
    assert len(keys([1, 2, 3])) == 1
    assert len(keys([1, 2, 3, 4])) == 2


def test_a_key_stands_for_the_whole_prefix() -> None:
    assert keys([1, 2, 3, 4])[0] == keys([1, 2, 9, 9])[0]
    assert keys([1, 2, 3, 4])[1] != keys([9, 9, 3, 4])[1]


def test_another_salt_gives_other_keys() -> None:
    assert keys([1, 2], seed=chain_seed("tenant")) != keys([1, 2])


def test_a_chain_can_be_continued_from_its_last_key() -> None:
    whole = keys([1, 2, 3, 4, 5, 6])
    assert whole[1:] == hash_blocks([3, 4, 5, 6], 2, whole[0])


def test_keys_are_the_same_in_every_process() -> None:
    assert keys([1, 2])[0].hex() == "678557f36af929ff9318caec9f37057b"


def test_lists_tuples_and_arrays_hash_alike() -> None:
    tokens = list(range(300))
    assert keys(tokens, 128) == keys(tuple(tokens), 128)  # type: ignore[arg-type]
    assert keys(tokens, 128) == hash_blocks(np.arange(300), 128, SEED)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_a_token_beyond_32_bits_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="32-bit"):
        keys([token, 1])


def test_a_match_ends_at_the_first_block_that_is_not_held() -> None:
    index = PrefixIndex(10)
    index.insert(keys([1, 2, 3, 4, 5, 6]))
    assert index.match(keys([1, 2, 3, 4, 9, 9])) == 2
    assert index.match(keys([9, 9])) == 0
    assert index.match([]) == 0


def test_tails_leave_before_heads() -> None:
    index = PrefixIndex(3)
    chain = keys([1, 2, 3, 4, 5, 6])
    index.insert(chain)
    index.insert(keys([7, 8]))
    assert index.match(chain) == 2


def test_the_least_recently_inserted_chain_leaves_first() -> None:
    index = PrefixIndex(2)
    first, second, third = keys([1, 1]), keys([2, 2]), keys([3, 3])
    index.insert(first)
    index.insert(second)
    index.insert(first)
    index.insert(third)
    assert [index.match(k) for k in (first, second, third)] == [1, 0, 1]


def test_looking_does_not_keep_a_block() -> None:
    index = PrefixIndex(2)
    first, second = keys([1, 1]), keys([2, 2])
    index.insert(first)
    index.insert(second)
    index.match(first)
    index.insert(keys([3, 3]))
    assert index.match(first) == 0


def test_a_chain_longer_than_the_cache_leaves_its_head() -> None:
    index = PrefixIndex(2)
    chain = keys([1, 2, 3, 4, 5, 6])
    index.insert(chain)
    assert index.match(chain) == 2
    assert len(index) == 2


def test_a_report_of_fewer_blocks_drops_the_missing_ones() -> None:
    index = PrefixIndex(10)
    chain = keys([1, 2, 3, 4, 5, 6])
    index.insert(chain)
    index.truncate(chain, 1)
    assert index.match(chain) == 1


def test_an_index_without_room_holds_nothing() -> None:
    index = PrefixIndex(0)
    index.insert(keys([1, 2, 3, 4]))
    assert index.match(keys([1, 2, 3, 4])) == 0
    with pytest.raises(ValueError, match="at least 0"):
        PrefixIndex(-1)


def test_an_index_that_is_resized_drops_its_oldest_blocks() -> None:
    index = PrefixIndex(10)
    chain = keys([1, 2, 3, 4, 5, 6])
    index.insert(chain)
    index.resize(2)
    assert (len(index), index.match(chain)) == (2, 2)


def test_only_the_ends_of_prompts_are_hits_of_an_engine_with_states() -> None:
    index = PrefixIndex(10)
    index.ends_only = True
    chain = keys(list(range(12)))
    index.insert(chain[:2])
    index.insert(chain[:5])
    assert [index.match(chain[:n]) for n in range(7)] == [0, 0, 2, 2, 2, 5, 5]
