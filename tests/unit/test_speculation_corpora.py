"""Operator corpora: beside the old version, all or nothing at activation, in small portions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from benchmarks.draft_memory.one_row import OneRowMemory
from headrace_decode.speculative.corpus_loader import (
    PIECE_CHARS,
    PORTION_TOKENS,
    CorpusLoader,
    pieces,
    portions,
)
from headrace_decode.speculative.retrieval.corpus_manager import MAX_CALL_S, CorpusManager
from headrace_decode.speculative.retrieval.draft_memory import MemorySettings
from tests.support.clock import Clock

MIB = 1 << 20


@pytest.fixture
def memory(clock: Clock) -> OneRowMemory:
    return OneRowMemory(MemorySettings(capacity_bytes=2 * MIB), clock)


@pytest.fixture
def corpora(memory: OneRowMemory) -> CorpusManager:
    return CorpusManager(memory, timer=lambda: 0.0)


def run(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def run_command(corpora: CorpusManager, do: str, **arguments: Any) -> dict[str, Any]:
    """A command as it travels: through JSON."""
    answer = corpora.command(json.loads(json.dumps({"do": do, **arguments})))
    again: dict[str, Any] = json.loads(json.dumps(answer, allow_nan=False))
    return again


def put(corpora: CorpusManager, version: int, *documents: list[int], **more: Any) -> dict[str, Any]:
    """Load and activate a whole version of corpus "c"."""
    names = {"corpus": "c", "version": version, "tenant": more.pop("tenant", None)}
    run_command(corpora, "begin", **names)
    answer = run_command(corpora, "load", **names, sequences=list(documents), **more)
    assert answer["taken"] == len(documents)
    return run_command(corpora, "activate", **names, tokens=answer["tokens"])


def drafted(memory: OneRowMemory, *prompt: int, tenant: str = "x", most: int = 3) -> list[int]:
    handle = memory.open_request("now", np.array(prompt, np.int32), tenant)
    tokens: list[int] = memory.draft(handle, most).tokens.tolist()
    memory.close_request(handle, keep=False)
    return tokens


class TestCorpora:
    def test_from_its_activation_on_only_the_new_version_is_drafted_from(
        self, corpora: CorpusManager, memory: OneRowMemory
    ) -> None:
        put(corpora, 1, [1, 2, 10, 11])
        names = {"corpus": "c", "version": 2}
        run_command(corpora, "begin", **names)
        run_command(corpora, "load", **names, sequences=[[1, 2, 20, 21]])
        assert drafted(memory, 1, 2) == [10, 11]
        assert run_command(corpora, "activate", **names, tokens=4) == {"tokens": 4}
        assert drafted(memory, 1, 2) == [20, 21]

    def test_one_for_a_tenant_is_drafted_for_it_alone(
        self, corpora: CorpusManager, memory: OneRowMemory
    ) -> None:
        put(corpora, 1, [1, 2, 10], tenant="a")
        assert drafted(memory, 1, 2, tenant="a") == [10]
        assert drafted(memory, 1, 2, tenant="b") == []

    def test_one_for_all_is_refused_unless_switched_on(self, clock: Clock) -> None:
        memory = OneRowMemory(MemorySettings(capacity_bytes=2 * MIB, public_corpora=False), clock)
        corpora = CorpusManager(memory, timer=lambda: 0.0)
        answer = run_command(corpora, "begin", corpus="c", version=1)
        assert answer["error"] == (
            "corpus 'c' would be for all tenants, but speculation.corpora is false: set it to "
            "true, or name one tenant"
        )
        assert put(corpora, 1, [1, 2, 10], tenant="a") == {"tokens": 3}
        with pytest.raises(ValueError, match="for all tenants, which is not allowed"):
            memory.add_to_corpus("c", 1, [])

    def test_versions_only_grow(self, corpora: CorpusManager) -> None:
        put(corpora, 5, [1, 2, 3])
        for version in (0, 4, 5, 2**32):
            answer = run_command(corpora, "begin", corpus="c", version=version)
            assert answer == {
                "error": f"corpus 'c' has version 5: {version} is not above it",
            }
        assert run_command(corpora, "begin", corpus="c", version=6) == {"version": 6}
        assert "error" in run_command(corpora, "begin", corpus="c", version=6)

    def test_a_version_that_was_begun_again_takes_over_alone(
        self, corpora: CorpusManager, memory: OneRowMemory
    ) -> None:
        run_command(corpora, "begin", corpus="c", version=1)
        run_command(corpora, "load", corpus="c", version=1, sequences=[[1, 2, 10]])
        put(corpora, 2, [1, 2, 20])
        assert drafted(memory, 1, 2) == [20]
        late = run_command(corpora, "load", corpus="c", version=1, sequences=[[1, 2, 10]])
        assert late["error"].startswith("version 1 of corpus 'c' is not being loaded")
        assert "error" in run_command(corpora, "activate", corpus="c", version=1, tokens=3)
        assert drafted(memory, 1, 2) == [20]

    def test_a_version_that_does_not_fit_is_given_up_and_the_old_one_stays(
        self, corpora: CorpusManager, memory: OneRowMemory
    ) -> None:
        put(corpora, 1, [1, 2, 10])
        names = {"corpus": "c", "version": 2}
        run_command(corpora, "begin", **names)
        tokens = 0
        for start in range(100):
            some = run(1000 + 4000 * start, 4000)
            tokens += run_command(corpora, "load", **names, sequences=[some])["tokens"]
        answer = run_command(corpora, "activate", **names, tokens=tokens)
        assert "does not fit" in answer["error"]
        assert "raise speculation.drafter_options.capacity_bytes, 2097152 now" in answer["error"]
        assert drafted(memory, 1000 + 4000 * 99, 1001 + 4000 * 99) == []
        assert run_command(corpora, "list")["corpora"] in ([], [{**LISTED, "version": 1}])

    def test_a_dropped_one_is_drafted_no_more_until_it_is_loaded_again(
        self, corpora: CorpusManager, memory: OneRowMemory
    ) -> None:
        put(corpora, 7, [1, 2, 10])
        assert run_command(corpora, "drop", corpus="c", version=3) == {"dropped": True}
        assert drafted(memory, 1, 2) == []
        assert run_command(corpora, "list")["corpora"] == []
        assert run_command(corpora, "drop", corpus="c", version=9) == {"dropped": False}
        assert run_command(corpora, "drop", corpus="other", version=9) == {"dropped": False}
        put(corpora, 11, [1, 2, 20])
        assert drafted(memory, 1, 2) == [20]

    def test_dropped_corpora_are_evicted_first(
        self, corpora: CorpusManager, memory: OneRowMemory
    ) -> None:
        put(corpora, 1, *(run(1000 * n, 900) for n in range(40)))
        run_command(corpora, "drop", corpus="c", version=2)
        before = memory.stats()["segments"]
        run_command(corpora, "begin", corpus="c", version=3, tokens=60_000)
        assert before == 40 and memory.stats()["segments"] == 0

    def test_after_its_time_it_is_drafted_no_more(
        self, corpora: CorpusManager, memory: OneRowMemory, clock: Clock
    ) -> None:
        put(corpora, 1, [1, 2, 10], ttl_s=60)
        clock.now_s += 59
        assert drafted(memory, 1, 2) == [10]
        clock.now_s += 2
        assert drafted(memory, 1, 2) == []
        assert run_command(corpora, "list")["corpora"] == []

    def test_the_list_has_tokens_and_outcomes(
        self, corpora: CorpusManager, memory: OneRowMemory
    ) -> None:
        put(corpora, 1, [1, 2, 10], [4, 5, 6, 7], ttl_s=60, tenant="a")
        run_command(corpora, "begin", corpus="c", version=2, tenant="a")
        run_command(corpora, "load", corpus="c", version=2, tenant="a", sequences=[[8, 9]])
        answer = run_command(corpora, "list")
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
        self, memory: OneRowMemory
    ) -> None:
        ticks = iter(n * MAX_CALL_S * 0.4 for n in range(100))
        corpora = CorpusManager(memory, timer=lambda: next(ticks))
        corpora.command({"do": "begin", "corpus": "c", "version": 1})
        documents = [run(10 * n, 5) for n in range(9)]
        load = {"do": "load", "corpus": "c", "version": 1}
        assert corpora.command({**load, "sequences": documents}) == {"taken": 3, "tokens": 15}
        slow = CorpusManager(memory, timer=iter([0.0, 9.0, 18.0]).__next__)
        slow.command({"do": "begin", "corpus": "d", "version": 1})
        answer = slow.command({**load, "corpus": "d", "sequences": documents})
        assert answer == {"taken": 1, "tokens": 5}

    def test_room_for_the_expected_tokens_is_made_at_once(
        self, corpora: CorpusManager, memory: OneRowMemory
    ) -> None:
        run_command(corpora, "begin", corpus="c", version=1, tokens=20_000)
        used = memory.stats()["used_bytes"]
        run_command(corpora, "load", corpus="c", version=1, sequences=[run(0, 8000)])
        assert memory.stats()["used_bytes"] - used < 1000

    @pytest.mark.parametrize(
        ("command", "says"),
        [
            ({"do": "burn"}, "do must be one of list, begin, load, activate, drop"),
            ({}, "do must be one of"),
            ({"do": "begin"}, "missing"),
            ({"do": "begin", "corpus": "c", "version": 1, "colour": 2}, "colour"),
            ({"do": "load", "corpus": "c", "version": 1, "sequences": []}, "not being loaded"),
        ],
    )
    def test_a_wrong_command_is_answered_with_the_error(
        self, corpora: CorpusManager, command: dict[str, Any], says: str
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

    def __init__(self, name: str, memory: OneRowMemory) -> None:
        self.name, self.memory = name, memory
        self.commands: list[dict[str, Any]] = []
        corpora = CorpusManager(memory, timer=lambda: 0.0)

        async def send_command(command: dict[str, Any]) -> dict[str, Any] | None:
            self.commands.append(command)
            return corpora.command(command)

        self.loader = CorpusLoader(letters, send_command)

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
    async def test_parts_come_in_order_and_then_the_activation(self, memory: OneRowMemory) -> None:
        replica = Replica("a", memory)
        assert await replica.part(0, "the cat sat", "down") == {"tokens": 15}
        assert await replica.part(1, "again") == {"tokens": 20}
        assert drafted(memory, *map(ord, "the c")) == []
        assert await replica.flip() == {"tokens": 20}
        assert drafted(memory, *map(ord, "the c")) == list(map(ord, "at "))

    async def test_a_replica_that_missed_a_part_refuses_the_rest(
        self, memory: OneRowMemory
    ) -> None:
        replica = Replica("a", memory)
        for number in (1, 2):
            answer = await replica.part(number, "late")
            assert answer["error"].startswith(
                f"part {number} of version 7 of corpus 'c' is not the next"
            )
        assert "error" in await replica.flip()
        await replica.part(0, "one")
        assert "error" in await replica.part(2, "three")
        assert "error" in await replica.part(1, "two", version=8)
        assert await replica.part(1, "two") == {"tokens": 6}
        assert "error" in await replica.flip(version=8)

    async def test_the_same_version_is_not_begun_twice(self, memory: OneRowMemory) -> None:
        replica = Replica("a", memory)
        await replica.part(0, "one")
        assert "7 is not above" in (await replica.part(0, "one"))["error"]

    async def test_only_one_replica_sends_a_corpus_on(self, memory: OneRowMemory) -> None:
        told: list[str] = []
        memory.on_activate = lambda key, name, version: told.append(name)
        for name in ("a", "b"):
            replica = Replica(name, memory)
            version = 1 + len(told) + (name == "b")
            await replica.part(0, "text", version=version)
            await replica.flip(teller="a", version=version)
        assert told == ["c"]

    async def test_documents_that_did_not_fit_into_a_call_are_sent_again(
        self, memory: OneRowMemory
    ) -> None:
        taken: list[int] = []

        async def send_command(command: dict[str, Any]) -> dict[str, Any] | None:
            if command["do"] == "load":
                taken.append(len(command["sequences"]))
                return {"taken": 2, "tokens": 2}
            return {}

        loader = CorpusLoader(letters, send_command)
        part = {"do": "part", "corpus": "c", "version": 1, "part": 0, "texts": list("abcde")}
        assert await loader.command(part, "a") == {"tokens": 6}
        assert taken == [5, 3, 1]

    async def test_the_engine_gets_the_expected_number_of_tokens(
        self, memory: OneRowMemory
    ) -> None:
        replica = Replica("a", memory)
        await replica.part(0, "x" * 84, total_chars=840)
        assert replica.commands[0]["tokens"] == 10 * (84 + 16)

    async def test_without_a_memory_the_answer_is_none(self) -> None:
        async def send_command(command: dict[str, Any]) -> None:
            return None

        loader = CorpusLoader(letters, send_command)
        part = {"do": "part", "corpus": "c", "version": 1, "part": 0, "texts": ["a"]}
        assert await loader.command(part, "a") is None
        assert await loader.command({"do": "list"}, "a") is None

    async def test_tokenising_leaves_the_event_loop_free(self, memory: OneRowMemory) -> None:
        loop, freed = asyncio.get_running_loop(), asyncio.Event()

        def slow(texts: list[str]) -> list[list[int]]:
            loop.call_soon_threadsafe(freed.set)
            waiting = asyncio.run_coroutine_threadsafe(freed.wait(), loop)
            waiting.result(timeout=30)
            return letters(texts)

        loader = CorpusLoader(slow, Replica("a", memory).loader._send_command)
        part = {"do": "part", "corpus": "c", "version": 1, "part": 0, "texts": ["abc"]}
        assert await loader.command(part, "a") == {"tokens": 3}


def test_long_texts_are_cut_after_lines() -> None:
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
