"""The scheduler side of the store's connector without vLLM, and what it asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from headrace_engine.connector.scheduler_connector import SchedulerConnector
from headrace_engine.connector.store_work import StoreWork

B = 16


@dataclass
class Store:
    """A store that holds `held`."""

    held: set[bytes] = field(default_factory=set)
    leased: list[bytes] = field(default_factory=list)
    misses: int = 0

    def leading(self, hashes: Sequence[bytes]) -> int:
        return next((i for i, h in enumerate(hashes) if h not in self.held), len(hashes))

    def lease(self, hashes: Sequence[bytes]) -> None:
        self.leased += hashes

    def record_misses(self, blocks: int) -> None:
        self.misses += blocks

    def lacking(self, hashes: Sequence[bytes]) -> list[bool]:
        return [h not in self.held for h in hashes]


class Tiers:
    """Slower tiers that answer when the test says so."""

    lease_s = 30.0

    def __init__(self, *held: bytes) -> None:
        self.held = held
        self.asked: list[tuple[str, list[bytes]]] = []
        self.compute_s: list[float] = []
        self.ready = False

    def ask(self, request_id: str, hashes: Sequence[bytes], compute_s: float) -> None:
        self.asked.append((request_id, list(hashes)))
        self.compute_s.append(compute_s)

    def answer(self, request_id: str) -> list[str] | None:
        asked = dict(self.asked)[request_id]
        run = next((n for n, h in enumerate(asked) if h not in self.held), len(asked))
        return [f"place of {h.decode()}" for h in asked[:run]] if self.ready else None


class Pool:
    """vLLM's block pool: references by block id."""

    def __init__(self, blocks: int = 1000) -> None:
        self.blocks = list(range(blocks))
        self.references = dict.fromkeys(self.blocks, 0)

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            self.references[block] += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            self.references[block] -= 1

    def get_num_free_blocks(self) -> int:
        return len(self.blocks) - len(self.held)

    @property
    def held(self) -> list[int]:
        return [block for block, count in self.references.items() if count]


def hashes(n: int) -> list[bytes]:
    return [b"%d" % (100 + i) for i in range(n)]


def request(tokens: int, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "request_id": "r",
            "num_tokens": tokens,
            "num_computed_tokens": 0,
            "num_in_flight_tokens": 0,
            "block_hashes": hashes(tokens // B),
            "cache_salt": None,
            "skip_reading_prefix_cache": False,
            **fields,
        }
    )


class Engine:
    """One request's way through vLLM's scheduler, as far as the connector sees it."""

    def __init__(self, store: Store, req: SimpleNamespace, **options: Any) -> None:
        self.scheduler = SchedulerConnector(store, B, **options)
        self.pool = Pool()
        self.scheduler.bind(self.pool)
        self.request = req
        self.blocks = [10 + i for i in range(req.num_tokens // B + 1)]
        self.scheduler.added(req)

    def admit(self, local: int = 0) -> int:
        external = self.scheduler.matched(self.request, local)
        self.scheduler.allocated(self.request, [self.blocks], external)
        self.request.num_computed_tokens = local + external
        return external

    def step(self, tokens: int, *, new: bool = False, resumed: bool = False) -> StoreWork:
        cached = SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
        )
        news = []
        computed = self.request.num_computed_tokens
        if new:
            news.append(
                SimpleNamespace(req_id="r", block_ids=(self.blocks,), num_computed_tokens=computed)
            )
        else:
            cached.num_computed_tokens = [computed]
            cached.req_ids, cached.new_block_ids = ["r"], [(self.blocks,) if resumed else None]
            cached.resumed_req_ids = {"r"} if resumed else set()
        work = self.scheduler.step(
            SimpleNamespace(
                scheduled_new_reqs=news,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens={"r": tokens},
                scheduled_spec_decode_tokens={},
            )
        )
        self.request.num_computed_tokens += tokens
        self.request.num_in_flight_tokens += tokens
        return work

    def comes_back(self, tokens: int) -> None:
        self.request.num_in_flight_tokens -= tokens

    def idle(self) -> StoreWork:
        none = SimpleNamespace(
            req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
        )
        return self.scheduler.step(
            SimpleNamespace(
                scheduled_new_reqs=[], scheduled_cached_reqs=none, num_scheduled_tokens={}
            )
        )


def saved(work: StoreWork) -> list[int]:
    """The blocks that a step saves."""
    return [block for save in work.saves.values() for group in save.blocks for block in group]
