"""One decode and one prefill engine on a machine: `place` chooses as `options`, `price` did."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router import choose as new
from headrace.router import price as old
from headrace.router.cost import Costs
from headrace.router.index import PrefixIndex, chain_seed, hash_blocks
from headrace.router.load import EngineLoad
from headrace.router.options import DecodeEngine
from headrace.router.place import PlaceRequest, place
from headrace.router.plan import Geometry, PlanRequest, RouterSettings
from headrace.router.sides import PrefillSides
from headrace.router.view import View
from headrace_engine.steptime import StepTime
from headrace_kvstore.supply import MEDIA, Supply

BLOCK, TOKEN_BYTES = 16, 23_040


def fitted(base_s: float, token_s: float) -> StepTime:
    fit = StepTime()
    for size in (1, 40, 700, 2000) * 8:
        fit.observe(size, 2, 0, 900, size * size / 2, base_s + token_s * size)
    return fit


STEPS = [StepTime(), fitted(0.03, 1e-3), fitted(0.2, 5e-3), fitted(0.005, 1e-5)]
blocks = st.integers(0, 60)
supplies = st.lists(
    st.builds(
        lambda medium, length, wait: Supply(medium, length * BLOCK, wait * (medium in MEDIA[2:])),
        st.sampled_from(MEDIA),
        st.integers(1, 40),
        st.sampled_from([0.0, 0.01, 1.0]),
    ),
    max_size=5,
)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_the_choice_is_the_same_as_before(data: st.DataObject) -> None:
    draw, now = data.draw, 50.0
    settings_ = RouterSettings(
        itl_target_s=draw(st.sampled_from([None, 0.03, 0.3, 2.0])),
        stall_weight=draw(st.sampled_from([0.0, 1.0, 4.0])),
        max_step_tokens=draw(st.sampled_from([100, 512, 2048])),
    )
    costs = Costs(draw(st.sampled_from(STEPS)), draw(st.sampled_from(STEPS)))
    for _ in range(draw(st.sampled_from([0, 1, 30]))):
        costs.shared.observe(1.0, 0.03, draw(st.sampled_from([0.03, 0.05, 0.3])))
        costs.transfer.observe(10**7, 0.02), costs.load("nvme").observe(10**6, 0.01)
        costs.call.observe(draw(st.floats(-0.1, 0.3))), costs.handoff.observe(0.01)
    n = draw(st.integers(0, 1500))
    hashes = hash_blocks(range(n), BLOCK, chain_seed(""))
    index = PrefixIndex(1000)
    index.insert(hashes[: draw(blocks)])
    load = EngineLoad()
    queued, running = draw(st.integers(0, 900)), draw(st.sampled_from([0, 1, 4, 30]))
    if queued:
        load.reserve("q", queued, now - 0.1, queued * queued // 2)
    for number in range(running):
        load.start(str(number), 400)
    [side] = PrefillSides(settings_, 1000, 0.0, any_=True).values()
    side.index.insert(hashes[: draw(blocks)])
    side.shares_store = True
    for number in range(draw(st.integers(0, 3))):
        side.load.reserve(str(number), draw(st.integers(1, 900)), now - 0.2, 1000)
    stored = draw(supplies)

    engine = DecodeEngine(Geometry(BLOCK, TOKEN_BYTES, 1000, 1000), load, index, costs)
    asked = PlanRequest("a", range(n), stored_decode=stored)
    [option] = engine.options(asked, hashes, [side], settings_, now)
    ages = draw(st.tuples(st.sampled_from([0.0, 60.0, 500.0]), st.sampled_from([0.0, 60.0, 500.0])))
    steps = old.longest_steps(option.situation, costs, settings_)
    was = old.choose(option.price, steps, old.Ages(*ages), settings_)
    timeout_s = old.remote_timeout_s(option.price, costs, settings_, cold=side.cold)

    view = View(BLOCK, TOKEN_BYTES, settings_)
    node = view.node("here")
    for medium in ("dram", "nvme"):
        fit = costs.load(medium)
        view.set_load(node, medium, fit.fixed_s, fit.each_s)
    view.set_fit(1, costs.transfer.fixed_s, costs.transfer.each_s, costs.transfer.rms_error)
    for at, (role, fit, of) in enumerate(
        (("decode", costs.decode_step, load), ("prefill", costs.prefill_step, side.load))
    ):
        row = view.add(role, role, node, hbm=at, step_tokens=settings_.max_step_tokens)  # type: ignore[arg-type]
        view.set_steps(row, fit)
        e = view.engines[row]
        e["running"], e["context"] = of.running, of.running_context
        e["queue_s"] = of.queue_s(fit, settings_.max_step_tokens, now)
        e["at_s"] = now
        e["share"] = costs.shared.share
        e["call_s"], e["call_error_s"] = costs.call.seconds(), costs.call.rms_error
        e["handoff_s"], e["handoff_error_s"] = costs.handoff.seconds(), costs.handoff.rms_error
    held = np.array([index.match(hashes), side.index.match(hashes)], np.int32)
    plan = place(
        view,
        PlaceRequest("a", n, now, held, supplies=[stored], ages=new.Ages(*ages)),
    )

    assert dict(plan.predicted) == pytest.approx(option.price, rel=1e-9, abs=1e-12)
    margin = abs(option.price["local.total"] - option.price["remote.total"])
    if margin > 1e-9:
        assert (plan.kind, plan.explores) == (was.kind, was.explores)
    loaded = option.loaded_prefill if plan.kind == "remote" else option.loaded_decode
    assert plan.loaded_from == dict(loaded.by_medium)
    assert plan.cached_decode_tokens == option.cached_decode_tokens
    assert plan.cached_prefill_tokens == option.cached_prefill_tokens
    if plan.kind == "remote":
        assert plan.timeout_s == pytest.approx(timeout_s, rel=1e-9)
