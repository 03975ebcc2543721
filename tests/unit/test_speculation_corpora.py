"""Operator corpora: beside the old version, all or nothing at the flip, in small portions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from benchmarks.drafting.one_row import OneRowMemory as Memory
from headrace_decode.corpora import PIECE_CHARS, PORTION_TOKENS, CorpusLoader, pieces, portions
from headrace_decode.speculative.retrieval.corpus_loads import CALL_S, Corpora
from headrace_decode.speculative.retrieval.draft_memory import Settings
from tests.support.clock import Clock

MIB = 1 << 20


@pytest.fixture
def memory(clock: Clock) -> Memory:
    return Memory(Settings(capacity_bytes=2 * MIB), clock)


@pytest.fixture
def corpora(memory: Memory) -> Corpora:
    return Corpora(memory, timer=lambda: 0.0)


def run(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def tell(corpora: Corpora, do: str, **arguments: Any) -> dict[str, Any]:
    """A command as it travels: through JSON."""
    answer = corpora.command(json.loads(json.dumps({"do": do, **arguments})))
    again: dict[str, Any] = json.loads(json.dumps(answer, allow_nan=False))
    return again


def put(corpora: Corpora, version: int, *documents: list[int], **more: Any) -> dict[str, Any]:
    """Load and flip a whole version of corpus "c"."""
    names = {"corpus": "c", "version": version, "tenant": more.pop("tenant", None)}
    tell(corpora, "begin", **names)
    answer = tell(corpora, "load", **names, sequences=list(documents), **more)
    assert answer["taken"] == len(documents)
    return tell(corpora, "flip", **names, tokens=answer["tokens"])


def drafted(memory: Memory, *prompt: int, tenant: str = "x", most: int = 3) -> list[int]:
    handle = memory.open_request("now", np.array(prompt, np.int32), tenant)
    tokens: list[int] = memory.draft(handle, most).tokens.tolist()
    memory.close_request(handle, keep=False)
    return tokens


class TestCorpora:
    def test_a_version_is_drafted_from_its_flip_on_and_the_one_before_no_more(
        self, corpora: Corpora, memory: Memory
    ) -> None:
        put(corpora, 1, [1, 2, 10, 11])
        names = {"corpus": "c", "version": 2}
        tell(corpora, "begin", **names)
        tell(corpora, "load", **names, sequences=[[1, 2, 20, 21]])
        assert drafted(memory, 1, 2) == [10, 11]
        assert tell(corpora, "flip", **names, tokens=4) == {"tokens": 4}
        assert drafted(memory, 1, 2) == [20, 21]

    def test_one_for_a_tenant_is_drafted_for_it_alone(
        self, corpora: Corpora, memory: Memory
    ) -> None:
        put(corpora, 1, [1, 2, 10], tenant="a")
        assert drafted(memory, 1, 2, tenant="a") == [10]
        assert drafted(memory, 1, 2, tenant="b") == []

    def test_one_for_all_is_refused_unless_switched_on(self, clock: Clock) -> None:
        memory = Memory(Settings(capacity_bytes=2 * MIB, for_all=frozenset()), clock)
        corpora = Corpora(memory, timer=lambda: 0.0)
        answer = tell(corpora, "begin", corpus="c", version=1)
        assert answer["error"] == (
            "corpus 'c' would be for all tenants, but speculation.corpora is false: set it to "
            "true, or name one tenant"
        )
        assert put(corpora, 1, [1, 2, 10], tenant="a") == {"tokens": 3}
        with pytest.raises(ValueError, match="for all tenants, which is not allowed"):
            memory.add_to_corpus("c", 1, [])

    def test_versions_only_grow(self, corpora: Corpora) -> None:
        put(corpora, 5, [1, 2, 3])
        for version in (0, 4, 5, 2**32):
            answer = tell(corpora, "begin", corpus="c", version=version)
            assert answer == {
                "error": f"corpus 'c' has version 5: {version} is not above it",
            }
        assert tell(corpora, "begin", corpus="c", version=6) == {"version": 6}
        assert "error" in tell(corpora, "begin", corpus="c", version=6)

    def test_one_that_was_begun_anew_takes_over_alone(
        self, corpora: Corpora, memory: Memory
    ) -> None:
        tell(corpora, "begin", corpus="c", version=1)
        tell(corpora, "load", corpus="c", version=1, sequences=[[1, 2, 10]])
        put(corpora, 2, [1, 2, 20])
        assert drafted(memory, 1, 2) == [20]
        late = tell(corpora, "load", corpus="c", version=1, sequences=[[1, 2, 10]])
        assert late["error"].startswith("version 1 of corpus 'c' is not being loaded")
        assert "error" in tell(corpora, "flip", corpus="c", version=1, tokens=3)
        assert drafted(memory, 1, 2) == [20]

    def test_a_version_that_does_not_fit_is_given_up_and_the_old_one_stays(
        self, corpora: Corpora, memory: Memory
    ) -> None:
        put(corpora, 1, [1, 2, 10])
        names = {"corpus": "c", "version": 2}
        tell(corpora, "begin", **names)
        tokens = 0
        for start in range(100):
            some = run(1000 + 4000 * start, 4000)
            tokens += tell(corpora, "load", **names, sequences=[some])["tokens"]
        answer = tell(corpora, "flip", **names, tokens=tokens)
        assert "does not fit" in answer["error"]
        assert "raise speculation.drafter_options.capacity_bytes, 2097152 now" in answer["error"]
        assert drafted(memory, 1000 + 4000 * 99, 1001 + 4000 * 99) == []
        assert tell(corpora, "list")["corpora"] in ([], [{**LISTED, "version": 1}])

    def test_a_dropped_one_is_drafted_no_more_until_it_is_loaded_again(
        self, corpora: Corpora, memory: Memory
    ) -> None:
        put(corpora, 7, [1, 2, 10])
        assert tell(corpora, "drop", corpus="c", version=3) == {"dropped": True}
        assert drafted(memory, 1, 2) == []
        assert tell(corpora, "list")["corpora"] == []
        assert tell(corpora, "drop", corpus="c", version=9) == {"dropped": False}
        assert tell(corpora, "drop", corpus="other", version=9) == {"dropped": False}
        put(corpora, 11, [1, 2, 20])
        assert drafted(memory, 1, 2) == [20]

    def test_what_was_dropped_gives_way_first(self, corpora: Corpora, memory: Memory) -> None:
        put(corpora, 1, *(run(1000 * n, 900) for n in range(40)))
        tell(corpora, "drop", corpus="c", version=2)
        before = memory.stats()["segments"]
        tell(corpora, "begin", corpus="c", version=3, tokens=60_000)
        assert before == 40 and memory.stats()["segments"] == 0

    def test_after_its_time_it_is_drafted_no_more(
        self, corpora: Corpora, memory: Memory, clock: Clock
    ) -> None:
        put(corpora, 1, [1, 2, 10], ttl_s=60)
        clock.now_s += 59
        assert drafted(memory, 1, 2) == [10]
        clock.now_s += 2
        assert drafted(memory, 1, 2) == []
        assert tell(corpora, "list")["corpora"] == []

    def test_the_list_says_what_is_held_and_how_it_fared(
        self, corpora: Corpora, memory: Memory
    ) -> None:
        put(corpora, 1, [1, 2, 10], [4, 5, 6, 7], ttl_s=60, tenant="a")
        tell(corpora, "begin", corpus="c", version=2, tenant="a")
        tell(corpora, "load", corpus="c", version=2, tenant="a", sequences=[[8, 9]])
        answer = tell(corpora, "list")
        assert answer["corpora"] == [
            {
                "corpus": "c",
                "tenant": "a",
                "version": 1,
                "segments": 2,
                "tokens": 7,
                "expires_s": 1060.0,
                "accepted": 0,
                "refused": 0,
                "loading_tokens": 2,
            }
        ]
        assert answer["stats"]["segments"] == 3

    def test_a_call_stops_when_its_time_is_over_and_takes_one_at_least(
        self, memory: Memory
    ) -> None:
        ticks = iter(n * CALL_S * 0.4 for n in range(100))
        corpora = Corpora(memory, timer=lambda: next(ticks))
        corpora.command({"do": "begin", "corpus": "c", "version": 1})
        documents = [run(10 * n, 5) for n in range(9)]
        load = {"do": "load", "corpus": "c", "version": 1}
        assert corpora.command({**load, "sequences": documents}) == {"taken": 3, "tokens": 15}
        slow = Corpora(memory, timer=iter([0.0, 9.0, 18.0]).__next__)
        slow.command({"do": "begin", "corpus": "d", "version": 1})
        answer = slow.command({**load, "corpus": "d", "sequences": documents})
        assert answer == {"taken": 1, "tokens": 5}

    def test_room_is_made_at_once_for_what_is_expected(
        self, corpora: Corpora, memory: Memory
    ) -> None:
        tell(corpora, "begin", corpus="c", version=1, tokens=20_000)
        used = memory.stats()["used_bytes"]
        tell(corpora, "load", corpus="c", version=1, sequences=[run(0, 8000)])
        assert memory.stats()["used_bytes"] - used < 1000

    @pytest.mark.parametrize(
        ("command", "says"),
        [
            ({"do": "burn"}, "do must be one of list, begin, load, flip, drop"),
            ({}, "do must be one of"),
            ({"do": "begin"}, "missing"),
            ({"do": "begin", "corpus": "c", "version": 1, "colour": 2}, "colour"),
            ({"do": "load", "corpus": "c", "version": 1, "sequences": []}, "not being loaded"),
        ],
    )
    def test_a_wrong_command_is_answered_with_what_is_wrong(
        self, corpora: Corpora, command: dict[str, Any], says: str
    ) -> None:
        assert says in corpora.command(command)["error"]


LISTED: dict[str, Any] = {
    "corpus": "c",
    "tenant": None,
    "version": 1,
    "segments": 1,
    "tokens": 3,
    "expires_s": None,
    "accepted": 0,
    "refused": 0,
    "loading_tokens": 0,
}


def letters(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


class Replica:
    """A loader over a memory, as a decode replica has it."""

    def __init__(self, name: str, memory: Memory) -> None:
        self.name, self.memory = name, memory
        self.commands: list[dict[str, Any]] = []
        corpora = Corpora(memory, timer=lambda: 0.0)

        async def tell(command: dict[str, Any]) -> dict[str, Any] | None:
            self.commands.append(command)
            return corpora.command(command)

        self.loader = CorpusLoader(letters, tell)

    async def part(self, number: int, *texts: str, **more: Any) -> dict[str, Any]:
        part = {"corpus": "c", "version": 7, "part": number, "texts": list(texts), **more}
        answer = await self.loader.command({"do": "part", **part}, self.name)
        assert answer is not None
        return answer

    async def flip(self, teller: str = "a", version: int = 7) -> dict[str, Any]:
        flip = {"corpus": "c", "version": version, "tenant": None, "teller": teller}
        answer = await self.loader.command({"do": "flip", **flip}, self.name)
        assert answer is not None
        return answer


class TestLoader:
    async def test_parts_come_in_order_and_the_flip_behind_them(self, memory: Memory) -> None:
        replica = Replica("a", memory)
        assert await replica.part(0, "the cat sat", "down") == {"tokens": 15}
        assert await replica.part(1, "again") == {"tokens": 20}
        assert drafted(memory, *map(ord, "the c")) == []
        assert await replica.flip() == {"tokens": 20}
        assert drafted(memory, *map(ord, "the c")) == list(map(ord, "at "))

    async def test_a_replica_that_missed_a_part_refuses_the_rest(self, memory: Memory) -> None:
        replica = Replica("a", memory)
        for number in (1, 2):
            answer = await replica.part(number, "late")
            assert answer["error"].startswith(
                f"part {number} of version 7 of corpus 'c' is not what"
            )
        assert "error" in await replica.flip()
        await replica.part(0, "one")
        assert "error" in await replica.part(2, "three")
        assert "error" in await replica.part(1, "two", version=8)
        assert await replica.part(1, "two") == {"tokens": 6}
        assert "error" in await replica.flip(version=8)

    async def test_the_same_version_is_not_begun_twice(self, memory: Memory) -> None:
        replica = Replica("a", memory)
        await replica.part(0, "one")
        assert "7 is not above" in (await replica.part(0, "one"))["error"]

    async def test_only_the_teller_tells(self, memory: Memory) -> None:
        told: list[str] = []
        memory.flipped = lambda key, name, version: told.append(name)
        for name in ("a", "b"):
            replica = Replica(name, memory)
            version = 1 + len(told) + (name == "b")
            await replica.part(0, "text", version=version)
            await replica.flip(teller="a", version=version)
        assert told == ["c"]

    async def test_what_the_engine_did_not_take_is_sent_again(self, memory: Memory) -> None:
        taken: list[int] = []

        async def tell(command: dict[str, Any]) -> dict[str, Any] | None:
            if command["do"] == "load":
                taken.append(len(command["sequences"]))
                return {"taken": 2, "tokens": 2}
            return {}

        loader = CorpusLoader(letters, tell)
        part = {"do": "part", "corpus": "c", "version": 1, "part": 0, "texts": list("abcde")}
        assert await loader.command(part, "a") == {"tokens": 6}
        assert taken == [5, 3, 1]

    async def test_the_engine_is_told_how_much_is_expected(self, memory: Memory) -> None:
        replica = Replica("a", memory)
        await replica.part(0, "x" * 84, total_chars=840)
        assert replica.commands[0]["tokens"] == 10 * (84 + 16)

    async def test_without_a_memory_the_answer_is_none(self) -> None:
        async def tell(command: dict[str, Any]) -> None:
            return None

        loader = CorpusLoader(letters, tell)
        part = {"do": "part", "corpus": "c", "version": 1, "part": 0, "texts": ["a"]}
        assert await loader.command(part, "a") is None
        assert await loader.command({"do": "list"}, "a") is None

    async def test_tokenising_leaves_the_event_loop_free(self, memory: Memory) -> None:
        loop, freed = asyncio.get_running_loop(), asyncio.Event()

        def slow(texts: list[str]) -> list[list[int]]:
            loop.call_soon_threadsafe(freed.set)
            waiting = asyncio.run_coroutine_threadsafe(freed.wait(), loop)
            waiting.result(timeout=30)
            return letters(texts)

        loader = CorpusLoader(slow, Replica("a", memory).loader._tell)
        part = {"do": "part", "corpus": "c", "version": 1, "part": 0, "texts": ["abc"]}
        assert await loader.command(part, "a") == {"tokens": 3}


def test_long_texts_are_cut_behind_lines() -> None:
    line = "x" * 999 + "\n"
    text = line * 40
    found = list(pieces(text))
    assert "".join(found) == text
    assert all(len(each) <= PIECE_CHARS and each.endswith("\n") for each in found)
    assert list(pieces("")) == []
    assert [len(each) for each in pieces("y" * (PIECE_CHARS + 1))] == [PIECE_CHARS, 1]


def test_portions_hold_whole_documents() -> None:
    documents = [[1] * 6000] * 7
    sizes = [sum(map(len, portion)) for portion in portions(documents)]
    assert sizes == [18_000, 18_000, 6000]
    assert all(size < PORTION_TOKENS + 6000 for size in sizes)
