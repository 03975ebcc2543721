"""An engine without a model: vLLM's scheduler and prefix cache, and how long each step takes.

A step computes, as vLLM's does, one token of each request that decodes and, with what is left of
its token budget, chunks of prompts in the order of their arrival. Its seconds are those of a
calibrated model (`headrace_engine.step_time`). A request enters when there is room for its prompt
and its longest answer, so none is ever preempted; answers are not cached.

Pure: who drives it waits for the seconds that `begin` tells, then calls `end`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.routers.cache import Key, PrefixCache
from headrace_engine.step_time import StepTime, pairs_of


@dataclass(frozen=True, slots=True)
class Machine:
    """Capacities of an engine.

    Attributes:
        steps: its step times.
        slow: factor on each step's time.
        blocks: number of blocks of its KV cache, of `block_tokens` tokens each.
        step_tokens, most_requests: maximum tokens and requests of one step (vLLM's
            max_num_batched_tokens, max_num_seqs).
    """

    steps: StepTime
    slow: float = 1.0
    blocks: int = 6437
    block_tokens: int = 64
    step_tokens: int = 1024
    most_requests: int = 256

    def seconds(self, prompt: int, rows: int, context: int, pairs: int) -> float:
        """Return the seconds of a step; see `StepTime.seconds`."""
        return self.slow * self.steps.seconds(prompt, rows, 0, context, pairs)

    def fit(self) -> dict[str, object]:
        """Return the step times as a replica reports them."""
        told = self.steps.to_dict()
        state = list(told["state"])
        state[-4] += math.log(self.slow)  # the level, by which all of a step is multiplied
        return {**told, "state": state}


@dataclass(slots=True, eq=False)
class Request:
    """One request in an engine.

    Attributes:
        prompt: tokens of it. keys: of its full blocks. answer: tokens of it, at least 1.
        emit: called with the number of answer tokens so far, at the end of the step that made one.
        done: prompt tokens whose KV is there. cached: those of them that were a hit.
    """

    prompt: int
    keys: Sequence[Key]
    answer: int
    emit: Callable[[int], None]
    done: int = 0
    cached: int = 0
    emitted: int = 0
    ahead: int = 0
    """Prompt tokens that it will compute, as far as could be seen when it came."""
    own: list[Key] = field(default_factory=list)
    plain: int = 0
    chunk: int = 0
    """Prompt tokens that the present step computes."""


class Engine:
    """One engine.

    Attributes:
        waiting, running: its requests.
        prompt_tokens, cached_tokens: of the requests that entered; the latter were hits.
        busy_s: seconds of all its steps. steps: how many.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.cache = machine, PrefixCache(machine.blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prompt_tokens = self.cached_tokens = 0
        self.busy_s, self.steps = 0.0, 0
        self._rows: list[Request] = []
        self._chunks: list[Request] = []

    # What a report says

    @property
    def rows(self) -> int:
        """Requests that decode."""
        return sum(one.done == one.prompt for one in self.running)

    @property
    def context(self) -> int:
        """Tokens that these attend to."""
        return sum(one.done + one.emitted for one in self.running if one.done == one.prompt)

    @property
    def coming(self) -> list[Request]:
        """Requests that do not decode yet."""
        return [*self.waiting, *(one for one in self.running if one.done < one.prompt)]

    def queue(self) -> tuple[int, int]:
        """Return the prompt tokens ahead of a new request, and the pairs that these are."""
        tokens = pairs = 0
        for one in self.running:
            tokens += one.prompt - one.done
            pairs += pairs_of(one.done, one.prompt)
        for one in self.waiting:
            tokens += one.ahead
            pairs += pairs_of(one.prompt - one.ahead, one.prompt)
        return tokens, pairs

    # Requests

    def submit(self, request: Request) -> None:
        """A request comes.

        Raises:
            ValueError: it can never enter.
        """
        size = self._blocks(request)
        if request.prompt < 1 or request.answer < 1 or size > self.machine.blocks:
            raise ValueError(f"{request.prompt} + {request.answer} tokens do not fit the engine")
        held = self._usable(request)
        request.ahead = request.prompt - held * self.machine.block_tokens
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Its client has gone. Unknown requests, and those that ended, are fine."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
            self._release(request)

    # Steps

    def begin(self) -> float | None:
        """Return the seconds of the next step, which begins now; None without work."""
        budget = self.machine.step_tokens
        self._rows = [one for one in self.running if one.done == one.prompt]
        budget -= len(self._rows)
        self._chunks = []
        for one in self.running:
            if one.done < one.prompt and budget > 0:
                budget -= self._take(one, budget)
        while self.waiting and budget > 0 and len(self.running) < self.machine.most_requests:
            if not self._enter(self.waiting[0]):
                break
            one = self.waiting.popleft()
            self.running.append(one)
            budget -= self._take(one, budget)
        if not self._rows and not self._chunks:
            return None
        seconds = self.machine.seconds(
            sum(one.chunk for one in self._chunks),
            len(self._rows),
            sum(one.prompt + one.emitted for one in self._rows),
            sum(pairs_of(one.done, one.done + one.chunk) for one in self._chunks),
        )
        self.busy_s += seconds
        self.steps += 1
        return seconds

    def end(self) -> None:
        """The step's seconds are over: its tokens are told, its blocks can be hit."""
        for one in self._chunks:
            if one.chunk:
                self._computed(one)
        ended = False
        for one in (*self._rows, *self._chunks):
            if one.done == one.prompt and one.emitted < one.answer:
                one.emitted += 1
                ended = ended or one.emitted == one.answer
                one.emit(one.emitted)
        self._rows, self._chunks = [], []
        if ended:
            for one in self.running:
                if one.emitted == one.answer:
                    self._release(one)
            self.running = [one for one in self.running if one.emitted < one.answer]

    # Inside

    def _blocks(self, request: Request) -> int:
        return -(-(request.prompt + request.answer) // self.machine.block_tokens)

    def _usable(self, request: Request) -> int:
        """Return the leading blocks that spare computation: at least the last token is computed."""
        most = (request.prompt - 1) // self.machine.block_tokens
        return min(self.cache.match(request.keys), most)

    def _enter(self, request: Request) -> bool:
        held = self._usable(request)
        keys = list(request.keys[:held])
        more = self._blocks(request) - held
        if not self.cache.room(keys, more):
            return False
        self.cache.hold(keys)
        self.cache.take(more)
        request.own, request.plain = keys, more
        request.cached = request.done = held * self.machine.block_tokens
        self.prompt_tokens += request.prompt
        self.cached_tokens += request.cached
        return True

    def _take(self, request: Request, budget: int) -> int:
        request.chunk = min(budget, request.prompt - request.done)
        self._chunks.append(request)
        return request.chunk

    def _computed(self, request: Request) -> None:
        size = self.machine.block_tokens
        before, request.done = request.done, request.done + request.chunk
        request.chunk = 0
        for number in range(before // size, min(request.done // size, len(request.keys))):
            key = request.keys[number]
            if self.cache.fill(key, request.keys[number - 1] if number else None):
                request.own.append(key)
                request.plain -= 1

    def _release(self, request: Request) -> None:
        self.cache.release(request.own, request.plain)
        request.own, request.plain = [], 0
        request.chunk = 0
        self._rows = [one for one in self._rows if one is not request]
        self._chunks = [one for one in self._chunks if one is not request]
