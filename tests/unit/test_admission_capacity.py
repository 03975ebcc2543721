"""The free capacity of the replicas, computed from a view of them."""

from __future__ import annotations

from headrace.gateway.admission.capacity import compute_capacity
from headrace.router.placement.cluster_view import ClusterView
from headrace_engine.step_time import StepTime


def view(prefills: int = 1, decodes: int = 1) -> ClusterView:
    made = ClusterView(16, 1e5)
    node = made.node("n")
    for role, count in (("prefill", prefills), ("decode", decodes)):
        for number in range(count):
            made.set_steps(made.add(f"{role}{number}", role, node), StepTime())  # type: ignore[arg-type]
    return made


def test_idle_engines_have_room() -> None:
    there = compute_capacity(view(), 0.0, prompt_tokens=100)
    assert there.has_room and there.is_idle and (there.engines, there.rows) == (2, 1.0)


def test_a_prompt_ahead_on_every_engine_leaves_none_until_it_is_nearly_done() -> None:
    seen = view()
    for row in range(2):
        seen.reserve(row, 100_000, 1.0, 0.0)
    there = compute_capacity(seen, 0.0, prompt_tokens=100)
    assert not there.has_room and not there.is_idle
    done_s = float(seen.engines["queue_s"].max())
    assert compute_capacity(seen, done_s, prompt_tokens=100).has_room


def test_without_kv_blocks_there_is_no_room() -> None:
    seen = view()
    seen.engines["free_blocks"] = 6
    assert compute_capacity(seen, 0.0, prompt_tokens=100).streams == 0
    seen.engines["free_blocks"] = 14
    assert compute_capacity(seen, 0.0, prompt_tokens=100).streams == 2


def test_streams_beyond_an_itl_target_find_no_room_but_an_idle_engine_takes_one() -> None:
    seen = view()
    idle_s = StepTime().seconds(rows=1)
    assert compute_capacity(seen, 0.0, prompt_tokens=100, itl_s=idle_s / 2).streams == 1
    seen.engines["running"][1] = 5
    assert compute_capacity(seen, 0.0, prompt_tokens=100, itl_s=idle_s / 2).streams == 0
    assert compute_capacity(seen, 0.0, prompt_tokens=100, itl_s=100 * idle_s).streams > 100


def test_what_no_report_shows_yet_is_taken_off() -> None:
    open_ = compute_capacity(view(), 0.0, prompt_tokens=2000)
    assert not compute_capacity(view(), 0.0, prompt_tokens=2000, sent=8).has_room and open_.has_room


def test_a_view_without_a_decode_engine_has_no_engine_at_all() -> None:
    assert compute_capacity(view(decodes=0), 0.0, prompt_tokens=1).engines == 0
