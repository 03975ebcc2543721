"""The requests that are played twice: a part of a production trace, scaled down for two cores."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import aiohttp
import numpy as np
from numpy.typing import NDArray

from benchmarks.routers.work import ROOT, cut
from benchmarks.serving.load import Sample, complete
from headrace_kvstore.identity.prompt_hash import hash_prompt
from headrace_lab.simulate.trace import Trace, Workload

FIRST_TOKEN_ID = 1000
"""Above the special tokens of a tokenizer."""


@dataclass(frozen=True, slots=True)
class Requests:
    """In order of arrival: seconds from the first one on, token ids, tokens of each answer."""

    at_s: list[float]
    prompts: list[NDArray[np.uint32]]
    answers: list[int]

    def workload(self, block_tokens: int) -> Workload:
        """The same for the simulator: which blocks prompts share is read off their tokens."""
        chains = [hash_prompt(prompt, block_tokens, ROOT) for prompt in self.prompts]
        numbers: dict[bytes, int] = {}
        keys = [numbers.setdefault(block, len(numbers)) for chain in chains for block in chain]
        trace = Trace(
            arrival_s=np.asarray(self.at_s),
            prompt=np.array([len(prompt) for prompt in self.prompts], np.int32),
            output=np.asarray(self.answers, np.int32),
            starts=np.cumsum([0, *map(len, chains)]).astype(np.int64),
            keys=np.asarray(keys, np.int32),
            distinct=len(numbers),
            tick_s=0.0,
            block_tokens=block_tokens,
        )
        count = len(self.at_s)
        return Workload(
            trace=trace,
            arrival_s=trace.arrival_s,
            row=np.arange(count, dtype=np.int32),
            offset=np.zeros(count, np.int64),
            seconds=self.at_s[-1] + 1e-3,
            keys=max(1, len(numbers)),
        )


def scaled(
    trace: Trace, requests: int, seconds: float, number: int, keep: float, scale: int
) -> Requests:
    """So many requests of a share of the trace's conversations; another part of the trace, with
    other tokens, for each number. They come within so many seconds.

    Of each prompt every `scale`-th token is taken, so prompts share beginnings as in the trace,
    shorter by this factor; answers are shorter likewise.

    Raises:
        ValueError: the trace has not so many.
    """
    whole = cut(trace, requests * (number + 1), 0, seed=number, keep=keep)
    first = requests * number
    began_s = whole.at_s[first]
    speed = (whole.at_s[-1] - began_s) / seconds
    return Requests(
        [(at_s - began_s) / speed for at_s in whole.at_s[first:]],
        [(prompt[::scale] + FIRST_TOKEN_ID).astype(np.uint32) for prompt in whole.prompts[first:]],
        [max(1, answer // scale) for answer in whole.answers[first:]],
    )


async def open_loop(session: aiohttp.ClientSession, model: str, requests: Requests) -> list[Sample]:
    """Ask for each completion at its time, whatever became of those before."""
    began_s, tasks = time.perf_counter(), []
    for at_s, prompt, answer in zip(requests.at_s, requests.prompts, requests.answers, strict=True):
        await asyncio.sleep(began_s + at_s - time.perf_counter())
        tasks.append(asyncio.create_task(complete(session, model, prompt.tolist(), answer)))
    return await asyncio.gather(*tasks)
