"""The router against naive models: its index and its bookkeeping."""

import math
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.router import Geometry, PlanRequest, PrefillReport, Router, RouterSettings
from headrace.router.replica_planner.prefill_targets import PrefillTarget
from headrace.router.replica_planner.prefix_index import PrefixIndex, chain_seed, hash_blocks
from tests.support.plans import TOKENS, gateway_plan

BLOCK = 2
PROMPTS = st.lists(st.integers(0, 1), max_size=12)


class NaiveIndex:
    """Full prefixes as tuples in a plain dict, oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[tuple[int, ...], None] = {}

    @staticmethod
    def prefixes(tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:n]) for n in range(BLOCK, len(tokens) + 1, BLOCK)]

    def match(self, tokens: list[int]) -> int:
        n = 0
        for prefix in self.prefixes(tokens):
            if prefix not in self.held:
                break
            n += 1
        return n

    def insert(self, tokens: list[int]) -> None:
        for prefix in reversed(self.prefixes(tokens)):
            self.held.pop(prefix, None)
            self.held[prefix] = None
        for prefix in list(self.held)[: max(0, len(self.held) - self.capacity)]:
            del self.held[prefix]

    def truncate(self, tokens: list[int], blocks: int) -> None:
        for prefix in self.prefixes(tokens)[blocks:]:
            self.held.pop(prefix, None)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index, self.naive = PrefixIndex(9), NaiveIndex(9)

    @staticmethod
    def keys(tokens: list[int]) -> list[bytes]:
        return hash_blocks(tokens, BLOCK, chain_seed(""))

    @rule(tokens=PROMPTS)
    def insert(self, tokens: list[int]) -> None:
        self.index.insert(self.keys(tokens))
        self.naive.insert(tokens)

    @rule(tokens=PROMPTS)
    def match(self, tokens: list[int]) -> None:
        assert self.index.match(self.keys(tokens)) == self.naive.match(tokens)

    @rule(tokens=PROMPTS, blocks=st.integers(0, 6))
    def truncate(self, tokens: list[int], blocks: int) -> None:
        self.index.truncate(self.keys(tokens), blocks)
        self.naive.truncate(tokens, blocks)

    @invariant()
    def same_size_within_capacity(self) -> None:
        assert len(self.index) == len(self.naive.held) <= 9


TestIndexIsTheNaiveIndex = IndexMachine.TestCase
TestIndexIsTheNaiveIndex.settings = settings(max_examples=60, stateful_step_count=30)

IDS = st.sampled_from(["a", "b", "c", "d"])
REPLICAS = st.sampled_from(["", "x", "y"])


class BookkeepingMachine(RuleBasedStateMachine):
    """Any interleaving of calls, in any order, for known and unknown requests."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.router = Router(
            RouterSettings(remeasure_s=1.0, retry_s=1.0),
            Geometry(BLOCK, 10, decode_blocks=20, prefill_blocks=20),
            lambda: self.now,
            random.Random(1),
        )
        self.alive: set[str] = set()
        self.known: set[PrefillTarget] = set()

    @rule(request_id=IDS, tokens=st.integers(0, 3000), first=st.integers(0, 3))
    def plan(self, request_id: str, tokens: int, first: int) -> None:
        plan = self.router.plan(PlanRequest(request_id, range(first, first + tokens)))
        self.alive.add(request_id)
        assert all(math.isfinite(v) and v >= 0 for v in plan.predicted.values())
        assert (plan.timeout_s > 0) == (plan.kind == "remote")
        assert self.router.explain(request_id) == plan

    @rule(request_id=IDS, kind=st.sampled_from(["local", "remote"]), replica=REPLICAS)
    def adopt(self, request_id: str, kind: str, replica: str) -> None:
        replica = replica if kind == "remote" else ""
        given = gateway_plan(kind, decode="this replica", replica=replica)
        request = PlanRequest(request_id, range(TOKENS))
        if self.router.stale_reason(given, request) is None:
            plan = self.router.adopt(given, request)
            self.alive.add(request_id)
            assert (plan.kind, plan.plan_id) == (kind, "g-1")
            assert self.router.explain(request_id) == plan

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        request_id=IDS,
        call=st.floats(0, 9),
        queue=st.floats(0, 9),
        compute=st.floats(0, 9),
        cached=st.integers(0, 3000),
        replica=REPLICAS,
    )
    def prefill_done(
        self, request_id: str, call: float, queue: float, compute: float, cached: int, replica: str
    ) -> None:
        report = PrefillReport(call, queue, compute, cached, 100, replica)
        self.router.prefill_done(request_id, report)

    @rule(request_id=IDS, seconds=st.floats(0, 9), cached=st.integers(0, 3000))
    def first_token(self, request_id: str, seconds: float, cached: int) -> None:
        self.router.first_token(request_id, seconds, cached)

    @rule(request_id=IDS)
    def remote_failed(self, request_id: str) -> None:
        if self.router.explain(request_id) is not None:
            assert self.router.remote_failed(request_id, "failed").kind == "local"

    @rule(request_id=IDS, output=st.lists(st.integers(0, 9), max_size=5))
    def finished(self, request_id: str, output: list[int]) -> None:
        self.router.finished(request_id, output)
        self.alive.discard(request_id)

    @rule(up=st.booleans(), replica=REPLICAS)
    def probe(self, up: bool, replica: str) -> None:
        if up:
            self.router.prefill_up(replica)
        else:
            self.router.prefill_down("gone", replica)

    @rule(replicas=st.sets(REPLICAS))
    def members(self, replicas: set[str]) -> None:
        self.known |= set(self.router.targets.values())
        self.router.prefill_members(replicas)
        assert set(self.router.targets) == replicas

    @invariant()
    def loads_belong_to_living_requests(self) -> None:
        decode = self.router.decode_load
        assert decode.waiting_requests + decode.running <= len(self.alive)
        assert decode.waiting_tokens >= 0
        self.known |= set(self.router.targets.values())
        assert sum(side.load.waiting_requests for side in self.known) <= len(self.alive)
        assert all(side.load.waiting_tokens >= 0 for side in self.known)

    def teardown(self) -> None:
        for request_id in list(self.alive):
            self.router.finished(request_id)
        snapshot = self.router.snapshot()
        empty = {"waiting_tokens": 0, "waiting_requests": 0, "running": 0}
        assert snapshot["load"] == empty
        assert snapshot["active"] == 0
        for side in self.known:
            assert side.load.to_dict() == empty
            assert not side.breaker._sent


TestEverythingReservedIsReleased = BookkeepingMachine.TestCase
TestEverythingReservedIsReleased.settings = settings(max_examples=60, stateful_step_count=40)
