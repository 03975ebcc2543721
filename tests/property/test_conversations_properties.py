"""Chains of responses beside a naive model that walks from each response to the one before it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.conversations.items import count_entries, size_of
from headrace.gateway.conversations.records import Size, StoredResponse, TurnItems
from headrace.gateway.conversations.state_ids import RESPONSE, new_response_id, parse_id
from headrace.gateway.conversations.tenant_state import TenantState
from headrace.gateway.errors import ApiError
from headrace.gateway.kept_records.record_cipher import RecordCipher
from headrace.gateway.kept_records.sqlite_store import SqliteStore

MAX_BYTES = 2_000
Step = tuple[str, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "continue", "continue", "continue", "delete"]),
        st.integers(0, 30),
        st.integers(0, 3),
        st.integers(0, 200),
    ),
    max_size=40,
)


class Naive:
    """Responses as a linked list: each has its items and the id of the one before it."""

    def __init__(self) -> None:
        self.items: dict[str, list[bytes]] = {}
        self.previous: dict[str, str | None] = {}
        self.bytes: dict[str | None, int] = {None: 0}

    def history(self, response_id: str | None) -> list[bytes] | None:
        """All items up to a response; None if one is missing."""
        found: list[bytes] = []
        while response_id is not None:
            if response_id not in self.items:
                return None
            found = self.items[response_id] + found
            response_id = self.previous[response_id]
        return found


def texts(count: int, size: int, place: int) -> list[bytes]:
    return [
        msgspec.json.encode({"role": "user", "content": f"{place}.{number}." + "x" * size})
        for number in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_chain_is_what_a_walk_back_finds(steps: list[Step]) -> None:
    with TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder), 1e9, 10_000_000)
        state, naive = TenantState(store, RecordCipher(b"s" * 16), "a"), Naive()
        made: list[str] = []
        for place, (kind, of, count, size) in enumerate(steps):
            target = made[of % len(made)] if made and kind != "begin" else None
            if kind == "delete":
                delete(state, naive, target)
                continue
            expected = naive.history(target)
            try:
                had = None if target is None else state.history_of_response(target, MAX_BYTES)
            except ApiError as error:
                too_long = target in naive.items and naive.bytes[target] > MAX_BYTES
                assert error.status == (400 if too_long else 404)
                assert too_long or expected is None
                continue
            assert expected == ([] if had is None else had.items)
            own, out = texts(count, size, place), texts(1, size, -place - 1)
            response_id = new_response_id(None if had is None else had.thread)
            where = parse_id(RESPONSE, response_id)
            assert where is not None
            both = own + out
            turn = TurnItems(
                [] if had is None else had.earlier,
                own,
                out,
                total=size_of(both) + (Size() if had is None else had.size),
            )
            state.save_response(where, StoredResponse(b"{}"), turn, is_new=True)
            made.append(response_id)
            naive.items[response_id], naive.previous[response_id] = both, target
            naive.bytes[response_id] = naive.bytes[target] + sum(map(len, both))


def delete(state: TenantState, naive: Naive, target: str | None) -> None:
    """Delete a response from both; the second time it is not found."""
    if target is None:
        return
    was_there = naive.items.pop(target, None) is not None
    try:
        state.delete_response(target)
    except ApiError as error:
        assert error.status == 404 and not was_there
    else:
        assert was_there


@given(st.lists(st.lists(st.integers(), max_size=5), max_size=5))
def test_the_size_of_items_is_that_of_the_whole_list(contents: list[list[int]]) -> None:
    items = [{"role": "user", "content": content} for content in contents]
    raw = [msgspec.json.encode(item) for item in items]
    assert size_of([*raw, b"null"]) == Size(sum(map(len, raw)), len(raw), count_entries(items))
