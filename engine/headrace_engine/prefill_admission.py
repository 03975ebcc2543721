"""Decides how many prompts an engine computes at once.

A step with n prompt tokens takes about a + b n seconds. Putting another prompt of m tokens into
the same step saves one a, and makes each prompt already in it wait b m longer. So a prompt joins
only if

    b m k <= a          k: prompts already being computed

and otherwise waits for its turn: prompts that fill a step by themselves go one after the other,
which halves their mean time to first token against computing them together and takes no longer in
all; tiny ones share steps. a / b is read off the engine's fitted step times
(`StepTime.free_tokens`).

The turn goes to the prompt with the least

    due = arrival + MAX_STRETCH b m

so a short prompt, or a conversation's next turn, most of which is cached, passes long ones, but
only those that came within `MAX_STRETCH` times their own work before it: no prompt waits for those
that arrive later than that, however many they are. The shortest first has the least mean wait
(Schrage, "A proof of the optimality of the shortest remaining processing time discipline", 1968).
The prompts of one request are one piece of work: each one's arrival is the due time of the one
before it. Otherwise a request of a thousand prompts would be ahead of everything that arrives in
the seconds that they take. A stream that another replica began is due at its arrival: its client
waits in the middle of an answer.

A turn ends when the engine begins the step that computes the prompt: the next one is then with the
engine when that step ends. A turn that lasted until the prompt's first token would let a step
without a prompt pass before each next one. Prompts that need more than one step keep their turn
until the first token.

A prompt with a turn may wait in the engine for its grammar or its KV, and an engine reports nothing
while it makes no step. So a turn ends in any case after a few times its predicted time: an idle
engine gets the next prompt.

A short prompt need not wait for the end of such a long one. Beside other requests, the engine gives
no prompt more than 15 of 16 tokens of a step (`spare_tokens`; vLLM gives the first one all of
them), and prompts that fit into the other tokens are let in beside the long one. They take at most
a sixteenth of its steps' tokens, so it ends later by as much (measured:
`benchmarks.prefill_admission`). Pure asyncio.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace_engine.meter import EngineMeter, Step
from headrace_engine.step_time import pairs_of

MAX_STRETCH = 100.0
"""How many times its own work a prompt lets later ones pass it (docs/benchmarks.md has what other
values give)."""
MAX_TURNS, MIN_TURN_S = 3.0, 0.05
"""Limit of a turn: a multiple of the prompt's predicted seconds alone, and at least so many
seconds. Steps beside decoding requests take up to twice as long as alone
(`benchmarks.prefill_admission`)."""


@dataclass
class RequestPrompts:
    """The prompts of one request."""

    due_s: float = 0.0
    """Due time of the last prompt that has asked for a turn."""


@dataclass(eq=False)
class _Turn:
    """A prompt's turn; `begins` is done when it begins."""

    tokens: int
    due_s: float
    """Arrival plus a multiple of the prompt's own work. The turn with the least is next."""
    begins: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    limit: asyncio.TimerHandle | None = None
    """Timer that ends the turn if the engine reports nothing."""


class PrefillAdmission:
    """Gate that lets prompts into the engine, one after the other. Used from one event loop only.

    Args:
        meter: reports the engine's steps, and has the fit of their times.
        step_tokens: maximum number of tokens of one prompt that the engine computes in one step
            beside other requests.
        spare_tokens: tokens of other prompts that it computes beside them.
    """

    def __init__(self, meter: EngineMeter, step_tokens: int = 0, spare_tokens: int = 0) -> None:
        self._step_time = meter.step_time
        meter.on_step.append(self._on_step)
        self._step_tokens, self._spare_tokens = step_tokens, spare_tokens
        self._computing: set[_Turn] = set()
        self._beside: set[_Turn] = set()
        """Turns that began since the last step began, beside a prompt that takes several steps."""
        self._waiting: list[_Turn] = []

    @property
    def waiting(self) -> int:
        """Prompts that wait for their turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(
        self, tokens: int, job: RequestPrompts | None = None, *, resumes: bool = False
    ) -> AsyncIterator[None]:
        """Wait until a prompt of so many tokens may be computed.

        The block submits the prompt and waits for its first token.

        Args:
            job: the prompts that its request has asked for before.
            resumes: whether it continues a stream that another replica began.
        """
        job = job or RequestPrompts()
        arrival_s = max(asyncio.get_running_loop().time(), job.due_s)
        stretch = 0.0 if resumes else MAX_STRETCH
        job.due_s = arrival_s + stretch * self._step_time.added_s(tokens, 0)
        turn = _Turn(tokens, job.due_s)
        insort(self._waiting, turn, key=lambda waiting: waiting.due_s)
        self._admit()
        try:
            await turn.begins
            yield
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)
            self._end(turn)

    def _on_step(self, step: Step) -> None:
        """Let prompts in after a step: the next one has begun with all prompts that were let in."""
        self._beside.clear()
        if not self._takes_steps():
            self._computing.clear()
        self._admit()

    def _end(self, turn: _Turn) -> None:
        if turn.limit is not None:
            turn.limit.cancel()
        self._computing.discard(turn)
        self._beside.discard(turn)
        self._admit()

    def _takes_steps(self) -> bool:
        """Whether the prompts that are being computed take more than one step."""
        return sum(turn.tokens for turn in self._computing) > self._step_tokens

    def _may_join(self, tokens: int) -> bool:
        together = len(self._computing)
        return together == 0 or tokens * together <= self._step_time.free_tokens()

    def _admit(self) -> None:
        if self._takes_steps():
            self._admit_beside()
        while self._waiting and self._may_join(self._waiting[0].tokens):
            self._begin(self._waiting.pop(0), self._computing)

    def _admit_beside(self) -> None:
        """Let in the prompts that fit beside a prompt that takes several steps."""
        left = self._spare_tokens - sum(turn.tokens for turn in self._beside)
        stay = []
        for turn in self._waiting:
            if turn.tokens <= left:
                left -= turn.tokens
                self._begin(turn, self._beside)
            else:
                stay.append(turn)
        self._waiting = stay

    def _begin(self, turn: _Turn, others: set[_Turn]) -> None:
        if not turn.begins.done():  # else its request was cancelled
            others.add(turn)
            turn.begins.set_result(None)
            step_tokens = self._step_tokens or max(1, turn.tokens)
            pairs = pairs_of(0, turn.tokens)
            alone_s = self._step_time.prefill_s(turn.tokens, pairs, step_tokens=step_tokens)
            limit_s = max(MIN_TURN_S, MAX_TURNS * alone_s)
            turn.limit = asyncio.get_running_loop().call_later(limit_s, self._end, turn)
