"""Two gateways place requests on two decode and two prefill replicas: prompts go where their blocks
are, through whichever gateway they come, and again after a gateway was killed or a replica was
silent. Streams outlive the replicas that answer them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import httpx
import openai
import psutil
import pytest

from headrace.client import ResumingTransport
from tests.support.app import until
from tests.support.faults import engine_core
from tests.support.served import MODEL, ServedApp

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

CONVERSATIONS, TURNS = 8, 4
START_TOKENS = 4000
"""Enough that computing them anew costs more than busy cores make prices wrong. The machine's store
is too small for them (`tiny_args`), so they are where an engine has computed them."""
BLOCK_TOKENS = 128
"""vLLM's on a CPU."""
HEARD_S = 5.0
"""Within which gateways have heard of all that a replica did, unless it stands still."""
HITS = 0.95
"""Of the turns behind the first."""
HITS_AFTER = 0.85
"""Of the two turns after a fault. A replica that waits for a core is late with its blocks, and load
decides: one turn of sixteen may. With two replicas, half would hit by chance."""
SILENT_S = 10.0
MAX_ASKED = 60
"""Until nothing more goes to a replica that has become slow."""


@pytest.fixture
def client(served: ServedApp) -> Iterator[openai.OpenAI]:
    """Sends again what a killed gateway took with it."""
    # Each request comes over a connection of its own, so that both gateways get some.
    http = httpx.Client(headers={"connection": "close"})
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=3, timeout=60, http_client=http
    ) as client:
        yield client


class Conversation:
    """Asks on with all that was said so far.

    Attributes:
        plans: of its turns.
    """

    def __init__(
        self, served: ServedApp, client: openai.OpenAI, seed: int, tokens: int = START_TOKENS
    ) -> None:
        self._served, self._client = served, client
        self._random = random.Random(seed)
        self._tokens: list[int] = self._words(tokens)
        self.plans: list[dict[str, object]] = []

    def turn(self) -> None:
        heard = wait_until_heard(self._served, {}, 0)
        self._tokens += self._words(100)
        name = f"placing-{self._random.getrandbits(64):x}"
        self._client.completions.create(
            model=MODEL,
            prompt=self._tokens,
            max_tokens=8,
            temperature=0,
            extra_headers={"x-request-id": name},
        )
        plan = self._served.get(f"/headrace/v1/plans/{name}")
        self.plans.append({**plan, "prompt": len(self._tokens)})
        wait_until_heard(self._served, heard, new_blocks(plan, len(self._tokens)))

    def hits(self) -> list[bool]:
        """Of each turn behind the first that a gateway planned, whether the engine that prefilled
        had all blocks of the turn before. On busy cores keys may be late; then load decides."""
        return [
            int(str(plan["cached_prefill_tokens" if plan["replica"] else "cached_decode_tokens"]))
            >= int(str(before["prompt"])) // BLOCK_TOKENS * BLOCK_TOKENS
            for before, plan in zip(self.plans, self.plans[1:], strict=False)
            if placed(plan)
        ]

    def _words(self, count: int) -> list[int]:
        return [self._random.randrange(300, 1800) for _ in range(count)]


def placed(plan: dict[str, object]) -> bool:
    """Whether a gateway chose by the price, and not to measure something again. The plans of a
    silent replica are not known."""
    return plan.get("made_by") == "gateway" and not plan["explores"]


def new_blocks(plan: Mapping[str, Any], tokens: int) -> int:
    """How many blocks the engines of a plan have more than before: if the prompt was computed
    elsewhere, both have its blocks, and each says so."""
    held = [plan.get("cached_decode_tokens", 0)]
    if plan.get("replica"):
        held.append(plan.get("cached_prefill_tokens", 0))
    return sum(max(0, tokens // BLOCK_TOKENS - int(each) // BLOCK_TOKENS) for each in held)


def misses(talks: list[Conversation]) -> str:
    """What the plans say that missed."""
    planned = [[plan for plan in talk.plans[1:] if placed(plan)] for talk in talks]
    missed = [
        plan
        for talk, plans in zip(talks, planned, strict=True)
        for plan, hit in zip(plans, talk.hits(), strict=True)
        if not hit
    ]
    shown = (
        "prompt",
        "decode",
        "replica",
        "cached_decode_tokens",
        "cached_prefill_tokens",
        "reachable_tokens",
        "reasons",
    )
    return "\n".join(str({name: plan[name] for name in shown}) for plan in missed)


def gateways(served: ServedApp) -> dict[int, dict[str, Any]]:
    """What each gateway knows of the replicas, by its process; asked until both have answered."""
    found: dict[int, dict[str, Any]] = {}
    for _ in range(20):
        status = served.get("/headrace/v1/status")["gateway"]
        found[status["pid"]] = status["router"]
        if len(found) == 2:
            break
    return found


def wait_until_heard(served: ServedApp, before: Mapping[int, int], new: int) -> dict[int, int]:
    """The blocks that each gateway has heard of since it began, by its process; once each knows
    that requests are over, and of `new` blocks more than `before`. What is under way counts as a
    queue, and a short queue is worth all that a tiny model computes."""
    deadline = time.monotonic() + HEARD_S
    while True:
        known = gateways(served)
        heard = {pid: int(each["events"].get("blocks", 0)) for pid, each in known.items()}
        over = not any(each["booked"] for each in known.values())
        all_heard = all(heard[pid] >= before.get(pid, 0) + new for pid in heard)
        if (over and all_heard) or time.monotonic() > deadline:
            return heard
        time.sleep(0.2)  # each gateway asks all replicas for its status


def know_all(served: ServedApp) -> bool:
    known = gateways(served)
    return len(known) == 2 and all(each["replicas"] == 4 for each in known.values())


def test_prompts_go_where_their_blocks_are(served: ServedApp, client: openai.OpenAI) -> None:
    until(lambda: know_all(served), 400, "both gateways know of all replicas")
    talks = [Conversation(served, client, seed) for seed in range(CONVERSATIONS)]
    for _ in range(TURNS):
        for talk in talks:
            talk.turn()
    hits = [hit for talk in talks for hit in talk.hits()]
    assert sum(hits) >= HITS * len(hits), misses(talks)
    assert len(hits) >= len(talks) * (TURNS - 1) / 2, "gateways have made most plans"


def test_gateways_admit_by_what_replicas_told_and_tell_each_other(
    served: ServedApp, client: openai.OpenAI
) -> None:
    def asked(slo: str) -> openai.types.Completion:
        headers = {"x-headrace-slo": slo}
        return client.completions.create(
            model=MODEL, prompt=[400] * 50, max_tokens=2, extra_headers=headers
        )

    def queues() -> list[dict[str, object]]:
        every = (served.get("/headrace/v1/status")["gateway"] for _ in range(20))
        return list({status["pid"]: status["queue"] for status in every}.values())

    def know_each_other() -> bool:
        assert asked("quick").choices
        told = queues()
        return len(told) == 2 and all(
            (queue["priced"], queue["gateways"], queue["waiting"]) == (True, 2, 0) for queue in told
        )

    until(know_each_other, 120, "both gateways have admitted requests by prices")
    with pytest.raises(openai.BadRequestError, match="no SLO class 'gold'"):
        asked("gold")
    assert all(queue["refused"] == queue["expired"] == 0 for queue in queues())


@contextlib.contextmanager
def slowed(pid: int) -> Iterator[None]:
    """A process gets a fifth of the time, also where this thread is scheduled late."""
    done = threading.Event()

    def hold() -> None:
        ran_s = 0.02
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(4 * ran_s)
            os.kill(pid, signal.SIGCONT)
            began_s = time.monotonic()
            done.wait(0.02)
            ran_s = time.monotonic() - began_s

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        yield
    finally:
        done.set()
        holder.join()


def test_a_prefill_replica_that_becomes_slow_gets_no_more_work(
    served: ServedApp, client: openai.OpenAI
) -> None:
    def asked() -> Iterator[str]:
        """The replicas that gateways have prefill new prompts."""
        for seed in range(MAX_ASKED):
            one = Conversation(served, client, 200 + seed, tokens=1000)
            one.turn()
            yield from (str(plan["replica"]) for plan in one.plans if placed(plan))

    with ordered(served, "remote"):
        went = asked()
        slow = next(went)
        status = served.get("/headrace/v1/status")
        pid = next(each["pid"] for each in status["replicas"] if each["replica_id"] == slow)
        with slowed(engine_core(pid).pid):
            last = deque(islice(went, 10), maxlen=10)
            while last.count(slow) > 1:
                last.append(next(went))


@contextlib.contextmanager
def ordered(served: ServedApp, policy: str) -> Iterator[None]:
    """This policy holds for a time."""
    url = f"{served.url}/headrace/v1/router"
    httpx.put(url, json={"policy": policy}).raise_for_status()
    try:
        yield
    finally:
        httpx.put(url, json={"policy": "cost"}).raise_for_status()


def test_a_killed_gateway_loses_nothing_and_the_next_one_knows_where_blocks_are(
    served: ServedApp, client: openai.OpenAI
) -> None:
    talks = [Conversation(served, client, 100 + seed) for seed in range(CONVERSATIONS)]
    for talk in talks:
        talk.turn()
    whole = streams_of(served, resumes=True)
    for stream in whole:
        stream.join()
    streams = streams_of(served, resumes=True)
    killed = min(gateways(served))
    os.kill(killed, signal.SIGKILL)
    for stream in streams:
        stream.join()
    assert all(stream.done and not stream.error for stream in streams)
    assert [stream.tokens for stream in streams] == [stream.tokens for stream in whole]
    for talk in talks:
        talk.turn()
    until(lambda: killed not in gateways(served) and know_all(served), 400, "there are two again")
    time.sleep(1.0)  # for the snapshots
    for _ in range(2):
        for talk in talks:
            talk.turn()
    hits = [hit for talk in talks for hit in talk.hits()[-2:]]
    assert hits and sum(hits) >= HITS_AFTER * len(hits), misses(talks)


def test_a_replica_that_is_silent_for_ten_seconds_loses_nothing_and_blocks_are_found_again(
    served: ServedApp, client: openai.OpenAI
) -> None:
    """Neither reports nor what happens to its blocks come from it for ten seconds."""
    status = served.get("/headrace/v1/status")
    silent = next(each for each in status["replicas"] if each["role"] == "decode")
    talks = [Conversation(served, client, 300 + seed) for seed in range(CONVERSATIONS)]
    for talk in talks:
        talk.turn()
    os.kill(silent["pid"], signal.SIGSTOP)
    again = threading.Timer(SILENT_S, os.kill, (silent["pid"], signal.SIGCONT))
    again.start()
    try:
        for talk in talks:
            talk.turn()
    finally:
        again.join()
    until(lambda: know_all(served), 400, "both gateways know of all replicas again")
    time.sleep(1.0)  # for what was missed
    for _ in range(2):
        for talk in talks:
            talk.turn()
    hits = [hit for talk in talks for hit in talk.hits()[-2:]]
    assert hits and sum(hits) >= HITS_AFTER * len(hits), misses(talks)


STREAMS, STREAM_TOKENS = 6, 500


class Stream(threading.Thread):
    """One greedy answer, token by token.

    Attributes:
        replica: that answered first.
        longest_s: the longest silence after the first token.
    """

    def __init__(self, served: ServedApp, seed: int, *, resumes: bool) -> None:
        super().__init__()
        self._url, self._random = served.url, random.Random(seed)
        self._transport = ResumingTransport() if resumes else httpx.HTTPTransport()
        self.tokens: list[int] = []
        self.replica, self.longest_s, self.error = "", 0.0, ""
        self.answers, self.done = threading.Event(), False
        self.start()

    def run(self) -> None:
        body = {
            "model": MODEL,
            "prompt": [self._random.randrange(300, 1800) for _ in range(300)],
            "max_tokens": STREAM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        url = f"{self._url}/v1/completions"
        with (
            httpx.Client(transport=self._transport, timeout=120) as client,
            client.stream("POST", url, json=body) as response,
        ):
            self.replica = response.headers["x-headrace-replica"]
            heard_s = None
            for line in response.iter_lines():
                now = time.monotonic()
                self.longest_s = max(self.longest_s, now - (heard_s or now))
                heard_s = now
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    self.error = self.error or str(event.get("error", ""))
                    for choice in event.get("choices", ()):
                        self.tokens += choice["token_ids"]
                    self.answers.set()


def streams_of(served: ServedApp, *, resumes: bool = False) -> list[Stream]:
    """Some, each with its first token; the same ones each time."""
    streams = [Stream(served, seed, resumes=resumes) for seed in range(STREAMS)]
    for stream in streams:
        assert stream.answers.wait(60)
    return streams


@pytest.mark.parametrize(
    "how", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)]
)
def test_streams_go_on_when_their_replica_stops_or_dies(
    served: ServedApp, how: signal.Signals
) -> None:
    whole = streams_of(served)
    for stream in whole:
        stream.join()
    streams = streams_of(served)
    replicas = served.get("/headrace/v1/status")["replicas"]
    victim = Counter(stream.replica for stream in streams).most_common(1)[0][0]
    pid = next(one["pid"] for one in replicas if one["replica_id"] == victim)
    stopped = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in stopped:
        process.send_signal(how)
    for stream in streams:
        stream.join()
    if how == signal.SIGSTOP:
        for process in stopped:
            process.resume()
    cut = [stream for stream in streams if stream.replica == victim]
    print(f"{how.name}: longest silences {[round(stream.longest_s, 2) for stream in cut]} s")
    assert all(stream.done and not stream.error for stream in streams)
    assert [stream.tokens for stream in streams] == [stream.tokens for stream in whole]
    until(lambda: know_all(served), 400, "both gateways know of all replicas again")
