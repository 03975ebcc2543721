"""vLLM has the parts that counting usage uses.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from headrace_engine.usage.scheduler_usage import UsageUpdate
from headrace_engine.vllm.usage_stats import KEY, UsageWatch, pass_usage, vllm_counts
from tests.support.contracts import assert_fields, assert_takes, find

STATS = "engine/headrace_engine/vllm/usage_stats.py"
USAGE = "engine/headrace_engine/usage/scheduler_usage.py"
ENGINE = "engine/headrace_engine/vllm/engine.py"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


def test_a_scheduler_frees_each_request_that_ends_by_one_method() -> None:
    assert_takes(f"{SCHEDULER}._free_request", STATS, "request")
    for method in ("update_from_output", "finish_requests"):
        source = inspect.getsource(find(f"{SCHEDULER}.{method}", STATS))
        assert "self._free_request(request" in source, f"mend {STATS}"


def test_statistics_are_made_after_requests_were_freed_and_go_with_the_outputs() -> None:
    source = inspect.getsource(find(f"{SCHEDULER}.update_from_output", STATS))
    assert source.index("self._free_request(") < source.index("self.make_stats("), f"mend {STATS}"
    assert "eco.scheduler_stats = stats" in source, f"mend {STATS}"


def test_news_cross_the_border_between_processes_unread() -> None:
    update = UsageUpdate({"shop": [1, 2.5]}, [("a", "shop", [1, 2.5])], 0.5)
    stats = SchedulerStats(ec_connector_stats={KEY: update})
    encoded = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    found: Any = MsgpackDecoder(EngineCoreOutputs).decode(encoded)
    taken: list[Any] = []
    pass_usage(found.scheduler_stats, taken.append)
    assert taken == [UsageUpdate({"shop": [1, 2.5]}, [["a", "shop", [1, 2.5]]], 0.5)]
    assert found.scheduler_stats.ec_connector_stats is None


def test_statistics_of_an_encoders_connector_stay() -> None:
    class Stats:
        log_stats = True

        def make_stats(self) -> SchedulerStats:
            return SchedulerStats(ec_connector_stats={"theirs": 1})

    class Watched(UsageWatch, Stats):
        def take_usage(self) -> UsageUpdate:
            return UsageUpdate({}, [], 0.5)

    stats = Watched().make_stats()
    taken: list[Any] = []
    pass_usage(stats, taken.append)
    assert taken == [UsageUpdate({}, [], 0.5)] and stats.ec_connector_stats == {"theirs": 1}


def test_loggers_see_statistics_in_the_order_in_which_they_are_given() -> None:
    source = inspect.getsource(find("vllm.v1.metrics.loggers:StatLoggerManager.record", ENGINE))
    assert "for stat_logger in self.stat_loggers:" in source, f"mend {ENGINE}"


def test_a_frontend_reads_a_steps_statistics_before_its_callers_read_the_outputs() -> None:
    source = inspect.getsource(find("vllm.v1.engine.async_llm:AsyncLLM._run_output_handler", STATS))
    between = source[source.index("output_processor.process_outputs(") : source.index(".record(")]
    awaits = [line.strip() for line in between.splitlines() if "await " in line]
    assert awaits == [
        "await asyncio.sleep(0)",  # between pieces of many outputs
        "await engine_core.abort_requests_async(",  # only for stop strings
    ], f"mend {STATS}"


def test_a_request_has_what_usage_reads() -> None:
    source = inspect.getsource(find("vllm.v1.request:Request.__init__", USAGE))
    for name in ("num_stale_output_tokens", "drop_stale_output", "prefill_stats", "cache_salt"):
        assert f"self.{name}" in source, f"mend {USAGE}"
    assert_fields(
        *("vllm.v1.metrics.stats:PrefillStats", USAGE),
        *("num_prompt_tokens", "num_local_cached_tokens"),
    )


def test_a_step_has_what_usage_reads() -> None:
    assert_fields(
        *("vllm.v1.core.sched.output:SchedulerOutput", USAGE),
        *("num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs"),
        *("scheduled_spec_decode_tokens", "num_invalid_spec_tokens"),
    )
    source = inspect.getsource(find(f"{SCHEDULER}.update_from_output", USAGE))
    counted = "num_accepted = max(len(generated_token_ids) - num_sampled, 0)"
    assert counted in source and "num_sampled_tokens_per_step" in source, f"mend {USAGE}"


def test_prompts_and_answers_are_told_apart_as_vllm_does() -> None:
    source = inspect.getsource(find("vllm.v1.utils:compute_iteration_details", USAGE))
    assert "is_context_phase(req_id)" in source and "in new_req_ids" in source, f"mend {USAGE}"


def test_vllm_counts_what_usage_is_compared_with() -> None:
    stats = SchedulerStats(
        prefix_cache_stats=PrefixCacheStats(hits=3, queries=9),
        connector_prefix_cache_stats=PrefixCacheStats(hits=2, queries=9),
        iteration_details=SimpleNamespace(  # type: ignore[arg-type]
            is_dummy=False, num_ctx_tokens=7, num_generation_tokens=4
        ),
        spec_decoding_stats=SimpleNamespace(  # type: ignore[arg-type]
            num_draft_tokens=5, num_accepted_tokens=1
        ),
    )
    assert vllm_counts(stats, SimpleNamespace(num_generation_tokens=6)) == {
        "computed_tokens": 7,
        "decode_tokens": 4,
        "cached_tokens": 3,
        "external_tokens": 2,
        "drafted_tokens": 5,
        "accepted_tokens": 1,
        "output_tokens": 6,
    }
    assert vllm_counts(SchedulerStats(), None) == {}


def test_vllm_appends_a_word_to_a_requests_id() -> None:
    source = inspect.getsource(
        find("vllm.v1.engine.input_processor:InputProcessor.assign_request_id", USAGE)
    )
    assert 'f"{request.external_req_id}-{random_uuid():.8}"' in source, f"mend {USAGE}"
