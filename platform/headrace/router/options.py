"""What a prompt costs with each prefill replica that may be asked, beside computing it here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.router.cost import Costs
from headrace.router.index import PrefixIndex
from headrace.router.load import EngineLoad
from headrace.router.plan import Geometry, PlanRequest, RouterSettings
from headrace.router.price import Situation, price
from headrace.router.sides import PrefillSide
from headrace.router.stored import Loaded, worth_loading
from headrace_engine.steptime import StepTime, pairs_of
from headrace_kvstore.supply import Supply


@dataclass(frozen=True, slots=True)
class Option:
    """One prefill replica as a request's choice: the situation there and its price."""

    side: PrefillSide
    situation: Situation
    #: Seconds by part, as ``price`` says.
    price: dict[str, float]
    cached_decode_tokens: int
    cached_prefill_tokens: int
    loaded_decode: Loaded
    loaded_prefill: Loaded
    #: Wait at the prefill engine that this router's own requests explain.
    own_queue_s: float

    @property
    def remote_s(self) -> float:
        """Predicted seconds that asking this replica adds to everybody."""
        return self.price["remote.total"]


@dataclass(frozen=True, slots=True)
class DecodeEngine:
    """The decode engine's part of each option."""

    geometry: Geometry
    load: EngineLoad
    index: PrefixIndex
    costs: Costs

    def options(
        self,
        request: PlanRequest,
        hashes: list[bytes],
        sides: Sequence[PrefillSide],
        settings: RouterSettings,
        now_s: float,
    ) -> list[Option]:
        """The request priced with each of these replicas, in their order."""
        g, n, limit, costs = (
            self.geometry,
            len(request.token_ids),
            settings.max_step_tokens,
            self.costs,
        )
        held_d = self._held(self.index, hashes, n)
        cached_d = held_d * g.block_tokens
        loaded_d = self._loaded(
            request.stored_decode, cached_d, n, costs.decode_step, self.load, limit
        )
        decode_queue_s = self.load.queue_s(costs.decode_step, limit, now_s)
        options = []
        for side in sides:
            cached_p = self._held(side.index, hashes, n) * g.block_tokens
            stored = request.stored_decode if side.shares_store else request.stored_prefill
            loaded_p = self._loaded(stored, cached_p, n, costs.prefill_step, side.load, limit)
            own_queue_s = side.load.queue_s(costs.prefill_step, limit, now_s)
            s = Situation(
                uncached_decode_tokens=max(1, n - cached_d - loaded_d.tokens),
                uncached_prefill_tokens=max(1, n - cached_p - loaded_p.tokens),
                transfer_bytes=(math.ceil(n / g.block_tokens) - held_d) * g.block_bytes,
                running=self.load.running,
                decode_queue_s=decode_queue_s,
                prefill_queue_s=own_queue_s + side.others_wait_s(now_s, settings.remeasure_s),
                load_decode_bytes=loaded_d.bytes_read(g.kv_bytes_per_token),
                load_prefill_bytes=loaded_p.bytes_read(g.kv_bytes_per_token),
                pull_decode_s=loaded_d.wait_s,
                pull_prefill_s=loaded_p.wait_s,
                prompt_tokens=n,
                running_context=self.load.running_context,
            )
            cost = price(s, costs, settings)
            options.append(
                Option(side, s, cost, cached_d, cached_p, loaded_d, loaded_p, own_queue_s)
            )
        return options

    def _held(self, index: PrefixIndex, hashes: list[bytes], prompt_tokens: int) -> int:
        """Blocks in an engine's own cache that spare computation."""
        block = self.geometry.block_tokens
        return self._useful(index.match(hashes) * block, prompt_tokens) // block

    def _useful(self, held_tokens: int, prompt_tokens: int) -> int:
        """Tokens of whole blocks that spare computation: vLLM always computes at least the last."""
        block = self.geometry.block_tokens
        return min(held_tokens, max(0, prompt_tokens - 1)) // block * block

    def _loaded(
        self,
        supplies: Sequence[Supply],
        cached_tokens: int,
        prompt_tokens: int,
        step: StepTime,
        load: EngineLoad,
        step_tokens: int,
    ) -> Loaded:
        """What an engine loads of what the store could supply."""

        def seconds(loaded: Loaded) -> float:
            left = max(1, prompt_tokens - cached_tokens - loaded.tokens)
            compute_s = step.prefill_s(
                left,
                pairs_of(max(0, prompt_tokens - left), prompt_tokens),
                step_tokens=step_tokens,
                rows=load.running,
                context=load.running_context,
            )
            read = loaded.bytes_read(self.geometry.kv_bytes_per_token)
            return loaded.wait_s + max(compute_s, self.costs.load_s(read))

        held = sum(supply.length for supply in supplies)
        useful = self._useful(held, prompt_tokens)
        return worth_loading(supplies, cached_tokens, useful, seconds)
