"""Advice on disaggregation: whether it pays for the recent traffic, and how many replicas of each
role the traffic takes.

All splits of the engines at hand are compared by the seconds of a mean request: to its first token,
and those of its answer. `lambda` is requests a second, `o` tokens of an answer, `T(r)` seconds of a
step with `r` running requests (`headrace_engine.step_time`), `C` seconds to compute what the caches
lack of a prompt, `E` a mean::

    wait(n, C)  = ErlangC(n, a) / (n - a) E[C^2] / (2 E[C]),   a = lambda E[C]
    disaggregated(p, d):  ttft = wait(p, C_p) + E[C_p] + move + T(r)
                  token = T(r),                  r = lambda / d o token
    colocated(n):  ttft = wait(n, C_d) + E[C_d] + T(r)
                  token = T(r) / (1 - busy),     r = lambda / n o token,  busy = lambda / n E[C_d]

`wait` is that of M/G/n, one queue for n servers (Lee and Longton 1959), since each prompt goes
to the engine with the shortest wait. ErlangC is the part of the prompts that find all n busy.
A decode engine that computes prompts gives its streams the rest of its time. A split is overloaded
if an engine has more than a second of prompts a second, or if more requests would run than its KV
cache holds. Caches are assumed to hit as often in every split.

Pure: no Ray, no vLLM, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace_engine.kv_groups import BlockUse
from headrace_engine.step_time import StepTime

MIN_REQUESTS = 32
"""Minimum number of requests for an advice."""
MAX_BUSY = 0.8
"""Maximum part of its time or its places for which an engine should be busy."""
MAX_SPLITS = 64
"""Maximum number of splits that are compared; of many engines, evenly spaced ones."""
_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class TrafficLoad:
    """The traffic and its cost: means of a request, in seconds and tokens.

    Attributes:
        rate: requests a second.
        local_s, local_square: seconds to compute a prompt on a decode engine, and their square.
        remote_s, remote_square: the same on a prefill engine, with the call.
        move_s: seconds to bring a prompt's KV to the decode engine.
        steps: step times of a decode engine.
        most_running: maximum number of requests that its KV cache holds.
    """

    rate: float
    prompt_tokens: float
    answer_tokens: float
    local_s: float
    local_square: float
    remote_s: float
    remote_square: float
    move_s: float
    steps: StepTime
    most_running: int


@dataclass(frozen=True, slots=True)
class EngineSplit:
    """Engines of each role, and the seconds of a mean request; inf where they are overloaded.

    Attributes:
        busy: part of its time in which an engine that computes prompts does so.
        full: part of its places that a decode engine would need at its slowest step; above 1, it is
            overloaded.
    """

    prefill: int
    decode: int
    ttft_s: float
    token_s: float
    request_s: float
    busy: float
    full: float


@dataclass(frozen=True, slots=True)
class DisaggregationAdvice:
    """Splits of the engines at hand, and the engines that the recent traffic would take.

    Attributes:
        now: the engines as they are. colocated: as many engines without prefill engines. best: the
            best split of as many that has a prefill engine, as `prefill.replicas` is at least 1;
            None if there is one engine only.
        prefill, decode: the fewest engines of each role, disaggregated, that are busy at most
            `MAX_BUSY`.
    """

    now: EngineSplit
    colocated: EngineSplit
    best: EngineSplit | None
    prefill: int
    decode: int

    @property
    def disaggregation_pays(self) -> bool:
        return self.best is not None and _rank(self.best) < _rank(self.colocated)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able fields, with None in place of inf."""
        fields = {"disaggregation_pays": self.disaggregation_pays, **asdict(self)}
        for name in ("now", "colocated", "best"):
            if one := fields[name]:
                fields[name] = {k: v if math.isfinite(v) else None for k, v in one.items()}
        return fields


def _rank(one: EngineSplit) -> tuple[float, float, int]:
    """Return a key by which the better split is less: of overloaded ones, the less overloaded."""
    return one.request_s, max(one.busy, one.full), one.prefill


def advise(load: TrafficLoad, prefill: int, decode: int) -> DisaggregationAdvice:
    """Return the advice for a cluster of so many engines.

    Raises:
        ValueError: there is no decode engine, or no traffic.
    """
    if decode < 1 or prefill < 0 or not load.rate > 0.0:
        raise ValueError(f"{prefill} prefill and {decode} decode engines, {load.rate} requests/s")
    engines = prefill + decode
    each = max(1, -(-engines // MAX_SPLITS))
    splits = {p: split(load, p, engines - p) for p in {*range(0, engines, each), prefill}}
    return DisaggregationAdvice(
        splits[prefill],
        splits[0],
        min((one for p, one in splits.items() if p), key=_rank, default=None),
        max(1, math.ceil(load.rate * load.remote_s / MAX_BUSY)),
        max(1, math.ceil(places(load, load.rate) / MAX_BUSY)),
    )


def split(load: TrafficLoad, prefill: int, decode: int) -> EngineSplit:
    """Return the seconds of a mean request on so many engines of each role."""
    is_disaggregated, rate = prefill > 0, load.rate / (prefill or decode)
    mean_s, square, move_s = load.local_s, load.local_square, 0.0
    if is_disaggregated:
        mean_s, square, move_s = load.remote_s, load.remote_square, load.move_s
    busy = rate * mean_s
    taken = 0.0 if is_disaggregated else busy
    ttft_s = token_s = full = math.inf
    if taken < 1.0:
        slower = 1.0 / (1.0 - taken)
        full = slower * places(load, load.rate / decode)
        token_s, running = pace(load, load.rate / decode, slower)
        if busy < 1.0:
            ttft_s = (
                math.prod(queue_of(load.rate, prefill or decode, mean_s, square))
                + mean_s
                + move_s
                + step_s(load, running)
            )
    request_s = ttft_s + load.answer_tokens * token_s
    return EngineSplit(prefill, decode, ttft_s, token_s, request_s, busy, full)


def queue_of(rate: float, engines: int, mean_s: float, square: float) -> tuple[float, float]:
    """Return (part of the prompts that wait, mean seconds that these wait) at engines that are not
    overloaded. M/G/n, by the recursion of Erlang's loss formula B: C = n B / (n - a (1 - B))."""
    a, lost = rate * mean_s, 1.0
    for n in range(1, engines + 1):
        lost = a * lost / (n + a * lost)
    all_busy = engines * lost / (engines - a * (1.0 - lost))
    return all_busy, square / (2.0 * mean_s * (engines - a))


def places(load: TrafficLoad, rate: float) -> float:
    """Return how many decode engines `rate` requests a second keep full."""
    return rate * load.answer_tokens * step_s(load, load.most_running) / load.most_running


def pace(load: TrafficLoad, rate: float, slower: float) -> tuple[float, float]:
    """Return (seconds a token, requests that run) where as many requests arrive as leave: the least
    solution of r = rate o slower T(r)."""
    running = 0.0
    for _ in range(_ROUNDS):
        token_s = slower * step_s(load, running)
        now = rate * load.answer_tokens * token_s
        if now > load.most_running:
            break
        if now - running <= 1e-3 * now:
            return token_s, now
        running = now
    return math.inf, math.inf


def step_s(load: TrafficLoad, running: float) -> float:
    if running == math.inf:
        return running
    context = running * (load.prompt_tokens + load.answer_tokens / 2)
    return load.steps.seconds(rows=max(1.0, running), context=context)


def advice_of(replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the advice for the replicas of a status document, or None while too little is known.

    Each decode replica reports its own traffic and fits. Rates are added up, and they weight the
    other means.
    """
    routers = [one["router"] for one in replicas if one.get("role") == "decode"]
    prefill = sum(one.get("role") == "prefill" for one in replicas)
    load = load_of(routers)
    if load is None:
        return None
    traffics = [router["outcomes"]["traffic"] for router in routers if router.get("outcomes")]
    requests = sum(one["requests"] for one in traffics if one.get("rate", 0.0) > 0.0)
    advice = advise(load, prefill, len(routers))
    return {"requests": requests, "rate": load.rate} | advice.to_dict()


def kv_tokens(engines: Mapping[str, Any], tokens: float) -> float:
    """Return the tokens of requests of this length that fit into an engine's KV cache.

    Args:
        engines: `engines` of `Router.snapshot`.
    """
    capacity, use = engines["decode_blocks"] * engines["block_tokens"], engines.get("block_use")
    if use is None:
        return float(capacity)
    positions = max(tokens, 1.0) / engines["block_tokens"]
    return float(capacity * (positions / BlockUse(**use).blocks(positions)))


def load_of(routers: Sequence[Mapping[str, Any]]) -> TrafficLoad | None:
    """Return the traffic of decode replicas from their routers' documents (`Router.snapshot` with
    `outcomes`), or None while too little is known."""
    traffics = [router["outcomes"]["traffic"] for router in routers if router.get("outcomes")]
    traffics = [traffic for traffic in traffics if traffic.get("rate", 0.0) > 0.0]
    if sum(traffic["requests"] for traffic in traffics) < MIN_REQUESTS:
        return None
    rate = sum(traffic["rate"] for traffic in traffics)

    def mean(name: str) -> float:
        return float(sum(traffic["rate"] * traffic[name] for traffic in traffics) / rate)

    router = routers[0]
    engines = router["engines"]
    tokens = max(1.0, mean("prompt_tokens") + mean("answer_tokens") / 2)
    return TrafficLoad(
        rate,
        mean("prompt_tokens"),
        mean("answer_tokens"),
        mean("local_s"),
        mean("local_s_square"),
        mean("remote_s"),
        mean("remote_s_square"),
        mean("move_s"),
        StepTime.from_dict(router["step_times"]["decode"]),
        max(1, int(kv_tokens(engines, tokens) / tokens)),
    )
