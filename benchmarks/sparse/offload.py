"""Cost of offload for a sparse request: time between its answer's tokens, and their error.

    python -m benchmarks.sparse.offload --json FILE

SmolLM2 in bfloat16 on one thread, one engine in this process whose cache holds two prompts of
7,900 tokens; 10 % of the pages. One request at a time, first in the cache, then with offload, over
the same prompts, whose KV is computed once and then cached. Steps in which summaries are made are
left out. Then four whose KV comes as a whole, and eight whose contexts are four times the cache.

    itl_with_offload_vs_all_in_memory   medians
    itl.in_memory_ms                    of the latter
    hit_rate                            chosen pages that were in the cache already, of those whose
                                        KV had left it, in all offloaded answers, one at a time;
                                        steps that find empty slots, the first ones, left out
    hit_rate.with_first_steps           the same of all steps
    blocks_vs_all_in_memory             of the cache that an answer holds
    kl.in_memory, kl.offloaded          KL(exact || sparse) in nats by token of greedy answers, as
                                        far as both have the same tokens
    kl.offloaded_vs_in_memory           ratio of the two
    kl.tokens                           number of tokens that these are means over
    at_once.contexts_vs_cache           of the eight
    at_once.offloaded                   of them
    at_once.running                     maximum number of them whose answers grew in one step
    at_once.tokens_vs_alone             tokens a second of a step of that many, over those of a step
                                        of one with offload
    at_once.no_prompt.running, .tokens_vs_alone  the same of steps that compute no piece of a prompt
    at_once.prompt_piece_vs_alone       seconds of a step with such a piece, over those of one alone
    arrived.running, .staying           of four whose KV is in the cache as a whole first, most that
                                        answered in one step: as the scheduler decides, and if what
                                        runs in the cache stays there
    arrived.seconds_vs_staying          from the first request to the last token
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.sparse.itl import PROMPT
from benchmarks.sparse.serving import Engine, report, same_first
from headrace_decode.attention.settings import SparseSettings

ANSWER, TURNS, SHARE = 64, 2, 0.1
KL_PROMPTS, KL_ANSWER = 3, 48
AT_ONCE = 8
ARRIVED, ARRIVED_ANSWER = 4, 512
BLOCKS, BATCH_TOKENS = 125, 256
MIN_STEPS = 5
"""Minimum number of steps for a median."""


class OffloadEngine(Engine):
    """An engine that offloads, with a way of serving for each request."""

    def __init__(self) -> None:
        super().__init__(
            SparseSettings(offload_gib=1.5),
            num_gpu_blocks_override=BLOCKS,
            max_num_batched_tokens=BATCH_TOKENS,
            async_scheduling=False,
            max_logprobs=-1,
            scheduler_cls="benchmarks.sparse.planned.PlannedScheduler",
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        assert self.bound.offloading is not None
        self.offloading = self.bound.offloading

    def held(self) -> int:
        """Blocks of the cache that requests hold."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def hit_rates(self) -> dict[str, float]:
        """Return the hit rates over all requests, from the worker's counts."""
        seen = self.offloading.memory
        warm = 1 - (seen.missed - seen.cold) / max(seen.asked - seen.cold, 1)
        return {"hit_rate": warm, "hit_rate.with_first_steps": 1 - seen.missed / max(seen.asked, 1)}


Row = NDArray[np.float64]


@dataclass
class Answer:
    """The answer to one request.

    Attributes:
        tokens: its tokens.
        seconds: seconds of the steps that were sparse.
        blocks: number of blocks of the cache that it held last.
        logits: log-probabilities of each token, [vocabulary], if they were requested.
    """

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    blocks: int = 0
    logits: list[Row] = field(default_factory=list)


def answered(
    engine: OffloadEngine, prompt: list[int], share: float | None, offload: bool, **options: Any
) -> Answer:
    """Serve one request alone and return its answer."""
    engine.scheduler.offload = offload
    name = engine.add(prompt, options.pop("answer", ANSWER), share, **options)
    answer = Answer()
    for step in engine.steps():
        if step.sparse:
            answer.seconds.append(step.seconds)
            answer.blocks = engine.held() or answer.blocks
        if output := step.outputs.get(name):
            answer.tokens += output.token_ids
            answer.logits += [_row(one) for one in output.logprobs or ()]
    return answer


def _row(logprobs: Any) -> Row:
    """Return a token's log-probabilities in the vocabulary's order."""
    found = np.empty(len(logprobs))
    found[np.fromiter(logprobs, np.int64)] = [each.logprob for each in logprobs.values()]
    return found


def times(engine: OffloadEngine, prompt: list[int]) -> dict[str, float]:
    """Return the figures of requests one at a time."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    blocks = {}
    for _ in range(TURNS):
        for offload, into in seconds.items():
            answer = answered(engine, prompt, SHARE, offload)
            into += answer.seconds
            blocks[offload] = answer.blocks
    answered(engine, prompt[:64], None, False)  # the worker learns that the last one ended
    memory = statistics.median(seconds[False])
    return {
        "itl_with_offload_vs_all_in_memory": statistics.median(seconds[True]) / memory,
        "itl.in_memory_ms": memory * 1e3,
        "blocks_vs_all_in_memory": blocks[True] / blocks[False],
    }


def errors(engine: OffloadEngine, prompts: list[list[int]]) -> dict[str, float]:
    """Return the KL of each way, by the tokens of answers that begin alike."""
    found: dict[str, list[float]] = {}
    ways = {"exact": (None, False), "in_memory": (SHARE, False), "offloaded": (SHARE, True)}
    pairs = ("exact", "in_memory"), ("exact", "offloaded"), ("in_memory", "offloaded")
    for prompt in prompts:
        answers = {
            name: answered(engine, prompt, *way, answer=KL_ANSWER, logprobs=-1)
            for name, way in ways.items()
        }
        for one, other in pairs:
            name = other if one == "exact" else "offloaded_vs_in_memory"
            found.setdefault(name, []).extend(divergences(answers[one], answers[other]))
    answered(engine, prompts[0][:64], None, False)
    means = {f"kl.{name}": float(np.mean(each)) for name, each in found.items()}
    return means | {"kl.tokens": float(len(found["offloaded"])), **engine.hit_rates()}


def divergences(exact: Answer, other: Answer) -> list[float]:
    """KL(exact || other) of each token but the first, up to the first that differs."""
    alike = same_first(exact.tokens, other.tokens) + 1
    pairs = zip(exact.logits[1:alike], other.logits[1:alike], strict=True)
    return [float((np.exp(p) * (p - q)).sum()) for p, q in pairs]


def at_once(engine: OffloadEngine, prompts: list[list[int]], alone_s: float) -> dict[str, float]:
    """Return figures of requests that come together, which the scheduler serves as it decides."""
    engine.scheduler.offload = None
    names = [engine.add(prompt, ANSWER, SHARE) for prompt in prompts]
    lengths, offloaded = dict.fromkeys(names, 0), 0
    pieces: dict[int, list[float]] = {}
    pure: dict[int, list[float]] = {}
    for step in engine.steps():
        begun = any(lengths[name] == 0 for name in step.outputs)
        for name, each in step.outputs.items():
            lengths[name] += len(each.token_ids)
        offloaded = max(offloaded, len(engine.offloading))
        prompts_left = any(one.num_output_tokens == 0 for one in engine.scheduler.running)
        kind = pieces if begun or prompts_left else pure
        kind.setdefault(step.sparse, []).append(step.seconds)
    assert all(length == ANSWER for length in lengths.values()), lengths
    tokens = sum(len(prompt) + ANSWER for prompt in prompts)
    cache = (BLOCKS - 1) * engine.scheduler.block_size
    running = max(*pieces, *pure)
    seconds = pieces.get(running, []) + pure.get(running, [])
    alone = max(count for count, each in pure.items() if len(each) >= MIN_STEPS)
    return {
        "at_once.contexts_vs_cache": tokens / cache,
        "at_once.offloaded": float(offloaded),
        "at_once.running": float(running),
        "at_once.tokens_vs_alone": running * alone_s / statistics.median(seconds),
        "at_once.no_prompt.running": float(alone),
        "at_once.no_prompt.tokens_vs_alone": alone * alone_s / statistics.median(pure[alone]),
        "at_once.prompt_piece_vs_alone": statistics.median(
            [each for some in pieces.values() for each in some]
        )
        / alone_s,
    }


def arrived(engine: OffloadEngine, prompts: list[list[int]]) -> dict[str, float]:
    """Return the figures of contexts that come as from a prefill engine."""
    seconds, running = dict[bool | None, float](), dict[bool | None, int]()
    for offload in (False, None):
        engine.scheduler.offload = offload
        for prompt in prompts:
            engine.add(prompt, ARRIVED_ANSWER, SHARE, f"arrived {offload}", arrives=True)
        steps = list(engine.steps())
        seconds[offload] = sum(step.seconds for step in steps)
        running[offload] = max(step.sparse for step in steps)
    return {
        "arrived.running": float(running[None]),
        "arrived.staying": float(running[False]),
        "arrived.seconds_vs_staying": seconds[None] / seconds[False],
    }


def measured() -> dict[str, float]:
    """Return the figures."""
    engine = OffloadEngine()
    prompts = engine.prompts(PROMPT, AT_ONCE)
    figures = times(engine, prompts[0])
    print(figures, flush=True)
    alone_s = figures["itl_with_offload_vs_all_in_memory"] * figures["itl.in_memory_ms"] / 1e3
    figures |= errors(engine, prompts[:KL_PROMPTS])
    print(figures, flush=True)
    figures |= arrived(engine, prompts[:ARRIVED])
    print(figures, flush=True)
    return figures | at_once(engine, prompts, alone_s)


if __name__ == "__main__":
    report(__doc__, measured)
