"""The emulated engines of `benchmarks.routers`: cache, steps, pace, text."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.routers.cache import PrefixCache
from benchmarks.routers.engine import Engine, Machine, Request
from benchmarks.routers.figures import Targets
from benchmarks.routers.http import serve
from benchmarks.routers.load import Answer, open_loop
from benchmarks.routers.pacing import Pacer
from benchmarks.routers.replica import Replica
from benchmarks.routers.words import text_of, tokens_of
from benchmarks.routers.work import capacity, cut, made_up, reachable
from headrace_engine.step_time import StepTime, pairs_of
from headrace_lab.simulate.hardware import default_steps
from tests.support.prompt_keys import PromptKeys

MACHINE = Machine(default_steps(), blocks=64, block_tokens=4, step_tokens=16, most_requests=8)


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def request(prompt: int, answer: int, chain: list[bytes] | None = None) -> Request:
    return Request(prompt, chain or [], answer, lambda emitted: None)


def play(engine: Engine) -> float:
    """All steps until there is no work; their seconds."""
    total = 0.0
    while (seconds := engine.begin()) is not None:
        total += seconds
        engine.end()
    return total


class TestCache:
    def test_a_prefix_is_hit_up_to_the_first_block_that_is_missing(self) -> None:
        cache = PrefixCache(8)
        cache.take(2)
        assert cache.fill(b"a", None) and cache.fill(b"b", b"a")
        assert cache.match(keys("a", "b", "c")) == 2
        assert cache.match(keys("b", "a")) == 2
        assert cache.match(keys("c", "a")) == 0

    def test_the_least_recently_used_goes_first_and_of_one_prompt_its_end(self) -> None:
        cache = PrefixCache(3)
        cache.take(3)
        for key, parent in ((b"a", None), (b"b", b"a"), (b"c", b"b")):
            cache.fill(key, parent)
        cache.release(keys("a", "b", "c"), 0)
        cache.hold(keys("a"))
        cache.release(keys("a"), 0)
        cache.take(2)
        assert [one.key for one in cache.changes if not one.stored] == keys("c", "b")
        assert cache.match(keys("a")) == 1

    def test_what_runs_is_never_evicted(self) -> None:
        cache = PrefixCache(2)
        cache.take(1)
        cache.fill(b"a", None)
        assert cache.room([], 1) and not cache.room([], 2)
        with pytest.raises(ValueError, match="are available"):
            cache.take(2)

    def test_room_does_not_count_idle_blocks_that_the_request_itself_needs(self) -> None:
        cache = PrefixCache(2)
        cache.take(2)
        cache.fill(b"a", None)
        cache.fill(b"b", b"a")
        cache.release(keys("a", "b"), 0)
        assert cache.room([], 2) and not cache.room(keys("a"), 2)

    def test_the_second_of_two_equal_blocks_cannot_be_hit(self) -> None:
        cache = PrefixCache(4)
        cache.take(2)
        assert cache.fill(b"a", None)
        assert not cache.fill(b"a", None)
        cache.release(keys("a"), 1)
        assert cache.available == 4 and len(cache) == 1

    @given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=40))
    def test_blocks_are_never_lost_nor_made(self, chains: list[list[int]]) -> None:
        machine = Machine(default_steps(), blocks=12, block_tokens=2, step_tokens=5)
        engine, told = Engine(machine), set[bytes]()
        for chain in chains:
            chained = [bytes(chain[: end + 1]) for end in range(len(chain))]
            engine.submit(request(2 * len(chain), 2, chained))
            play(engine)
            for stored, key, _ in engine.cache.changes:
                (told.add if stored else told.remove)(key)
            engine.cache.changes = []
            assert engine.cache.available == 12
            assert told == set(engine.cache.keys())


class TestEngine:
    def test_a_prompt_takes_the_steps_that_the_model_says(self) -> None:
        engine, steps = Engine(MACHINE), default_steps()
        engine.submit(request(40, 1))
        chunks = ((0, 16), (16, 32), (32, 40))
        expected = sum(steps.seconds(b - a, pairs=pairs_of(a, b)) for a, b in chunks)
        assert play(engine) == pytest.approx(expected)

    def test_rows_come_before_chunks_and_share_the_budget(self) -> None:
        engine = Engine(MACHINE)
        one, two = request(4, 9), request(40, 1)
        engine.submit(one)
        engine.begin()
        engine.end()
        engine.submit(two)
        seconds = engine.begin()
        assert (one.emitted, two.chunk) == (1, 15)
        expected = default_steps().seconds(15, 1, 0, context=5, pairs=pairs_of(0, 15))
        assert seconds == pytest.approx(expected)

    def test_a_second_prompt_computes_only_what_differs_and_at_least_a_token(self) -> None:
        engine, chain = Engine(MACHINE), keys("a", "b", "c")
        for _ in range(2):
            engine.submit(request(12, 1, chain))
            play(engine)
        assert engine.cached_tokens == 8  # of 12: the last block holds the last token
        assert engine.prompt_tokens == 24

    def test_who_does_not_fit_waits_and_who_never_could_is_refused(self) -> None:
        engine = Engine(MACHINE)
        engine.submit(request(200, 8))
        engine.submit(request(200, 8))
        engine.begin()
        assert (len(engine.running), len(engine.waiting)) == (1, 1)
        with pytest.raises(ValueError, match="do not fit"):
            engine.submit(request(256, 8))

    def test_a_client_that_leaves_gives_its_blocks_back(self) -> None:
        engine, chain = Engine(MACHINE), keys("a", "b", "c", "d")
        one = request(16, 50, chain)
        engine.submit(one)
        engine.begin()
        engine.end()
        engine.begin()
        engine.abort(one)
        engine.end()
        assert engine.begin() is None
        assert engine.cache.available == MACHINE.blocks
        assert engine.cache.match(chain) == 4

    def test_the_queue_is_what_is_left_to_compute(self) -> None:
        engine = Engine(MACHINE)
        engine.submit(request(40, 1))
        engine.submit(request(10, 1))
        engine.begin()
        engine.end()
        assert engine.queue() == (34, pairs_of(16, 40) + pairs_of(0, 10))

    def test_what_is_reported_prices_as_the_engine_does(self) -> None:
        slow = Machine(default_steps(), slow=3.0)
        fit = StepTime.from_dict(slow.fit())
        told = fit.seconds(1000, 7, 0, 9000, 123_456)
        assert told == pytest.approx(slow.seconds(1000, 7, 9000, 123_456))


class TestPace:
    async def test_a_late_loop_does_not_slow_the_engine(self) -> None:
        machine = Machine(default_steps(), slow=0.5, block_tokens=16)
        engine, came = Engine(machine), list[float]()
        pacer, loop = Pacer(engine), asyncio.get_running_loop()
        over = asyncio.Event()

        def emit(emitted: int) -> None:
            came.append(loop.time())
            if emitted == 20:
                over.set()

        began = loop.time()
        pacer.submit(Request(16, [], 20, emit))
        await asyncio.wait_for(over.wait(), 10.0)
        took = came[-1] - began
        assert engine.busy_s + pacer.lost_s - 0.001 <= took <= engine.busy_s + pacer.lost_s + 0.05

    async def test_a_client_gets_every_token_and_a_stranger_an_error(self) -> None:
        replica = Replica(Machine(default_steps(), slow=0.1), "folder")
        server, port = await serve(replica.handle)
        prompt = text_of(np.arange(200, dtype=np.uint32))
        url = f"http://127.0.0.1:{port}"
        answers = await open_loop(
            url, [0.0, 0.01], [[prompt], [prompt[:400], prompt[400:]]], [5, 7]
        )
        assert [(one.tokens, one.error, one.prompt) for one in answers] == [
            (5, "", 200),
            (7, "", 200),
        ]
        assert all(0 < one.ttft_s < 5 for one in answers)
        assert len(answers[1].gaps_s) == 6
        assert replica.stats()["cached_tokens"] == 192  # the second prompt's full blocks
        too_long = text_of(np.zeros(500_000, np.uint32))
        (refused,) = await open_loop(url, [0.0], [[too_long]], [5])
        assert refused.error == "status 400"
        server.close()

    async def test_its_keys_are_those_of_vllm(self) -> None:
        replica = Replica(Machine(default_steps(), block_tokens=16), "folder")
        server, port = await serve(replica.handle)
        tokens = np.arange(100, dtype=np.uint32)
        body = {"prompt": text_of(tokens).decode(), "max_tokens": 3}
        asked = json.dumps({"target": "/v1/completions", "body": body}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /headrace/internal/keys HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(asked)
        writer.write(head + asked)
        answer = await reader.readuntil(b"}")
        told = json.loads(answer.partition(b"\r\n\r\n")[2])
        import base64

        got = np.frombuffer(base64.b64decode(told["keys"]), "<u8")
        assert got.tolist() == PromptKeys(16).keys(tokens).tolist()
        assert (told["prompt_tokens"], told["max_tokens"]) == (100, 3)
        writer.close()
        server.close()


@given(st.lists(st.integers(0, 4095), max_size=50))
def test_text_and_tokens_are_the_same(ids: list[int]) -> None:
    tokens = np.array(ids, np.uint32)
    text = text_of(tokens)
    assert len(text) == 4 * len(ids)
    assert tokens_of(text.decode()).tolist() == ids


def test_the_trace_made_up_is_like_the_real_one() -> None:
    work = cut(made_up(), 600, 400)
    lengths = [len(one) for one in work.prompts]
    assert 8_000 < np.mean(lengths) < 16_000
    assert 250 < np.mean(work.answers) < 450
    assert 0.15 < reachable(work, 64) < 0.6


def test_capacity_is_what_busy_engines_complete() -> None:
    """So two complete about twice as many as one."""
    machine = Machine(default_steps())
    work = cut(made_up(), 300, 150)
    one, two = capacity(work, machine, 1), capacity(work, machine, 2)
    assert 0.5 < one < 10.0
    assert 1.3 < two / one < 2.5


def test_targets_grow_with_the_prompt_and_with_slow_engines() -> None:
    targets = Targets(ttft_s=1.0, ttft_token_s=1e-3, itl_s=0.05).times(2.0)
    answer = Answer(0.0, prompt=1000, first_s=3.9, last_s=3.95, tokens=2)
    assert targets.kept(answer)
    assert not targets.kept(Answer(0.0, prompt=900, first_s=3.9, last_s=3.95, tokens=2))
    assert not targets.kept(Answer(0.0, prompt=1000, first_s=1.0, last_s=1.2, tokens=2))
