"""What we take from Ray and vLLM beyond their documented interfaces is there, in the same shape.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.kv_transfer.handoff import PARAMS_KEY, produce_params
from headrace_engine.meter import EngineMeter
from tests.support.contracts import assert_fields, assert_takes, find, parameters

ENGINE_RAY = "engine/headrace_engine/ray/engine.py"
ENGINE_VLLM = "engine/headrace_engine/vllm/engine.py"
DECODE_VLLM = "decode/headrace_decode/llm/planned_llm.py"
RENDERING = "engine/headrace_engine/vllm/openai_app.py"
PLATFORM_RAY = "engine/headrace_engine/ray/llm.py"
HANDOFF = "engine/headrace_engine/kv_transfer/handoff.py"
DECODE_SERVER = "decode/headrace_decode/server.py"
PREFILL_SERVER = "prefill/headrace_prefill/server.py"
APP = "platform/headrace/app.py"
DROP_IN = "platform/headrace/deploy/drop_in.py"


# Ray

ENGINE = "ray.llm._internal.serve.engines.vllm.vllm_engine:VLLMEngine"


def test_rays_engine_starts_its_llm_through_one_method_that_we_override() -> None:
    method = f"{ENGINE}._start_async_llm_engine"
    names = list(parameters(find(method, ENGINE_RAY)))
    assert names == ["self", "vllm_engine_args", "vllm_engine_config", "placement_group"], (
        f"{method} takes {names} now: mend {ENGINE_RAY}"
    )
    source = inspect.getsource(find(f"{ENGINE}.start", ENGINE_RAY))
    assert "self._start_async_llm_engine(" in source, f"start() goes another way: {ENGINE_RAY}"
    assert "self._engine_client = " in source, f"the client is kept elsewhere: {ENGINE_RAY}"


def test_rays_own_start_of_the_llm_does_what_our_override_repeats() -> None:
    source = inspect.getsource(find(f"{ENGINE}._start_async_llm_engine", ENGINE_RAY))
    for line in (
        "vllm_engine_config.parallel_config.placement_group = placement_group",
        "_clear_current_platform_cache()",
        "Executor.get_class(vllm_engine_config)",
        "vllm_engine_args.enable_log_requests",
    ):
        assert line in source, f"{line!r} is gone from Ray's start: read it and mend {ENGINE_RAY}"


def test_the_engines_platform_cache_can_be_cleared() -> None:
    clear = find(
        "ray.llm._internal.serve.engines.vllm.vllm_engine:_clear_current_platform_cache",
        ENGINE_RAY,
    )
    assert not parameters(clear), f"_clear_current_platform_cache takes arguments: {ENGINE_RAY}"


def test_the_download_of_a_local_model_can_be_skipped() -> None:
    config = "ray.serve.llm:LLMConfig"
    find(f"{config}.get_or_create_callback", ENGINE_RAY)
    context = find("ray.llm._internal.common.callbacks.base:CallbackCtx", ENGINE_RAY)
    assert "run_init_node" in context.__dataclass_fields__, f"mend {ENGINE_RAY}"


def test_servers_take_an_engine_class() -> None:
    servers = "ray.serve.llm.deployment"
    assert_takes(f"{servers}:LLMServer.__init__", PREFILL_SERVER, "llm_config", "engine_cls")
    assert_takes(f"{servers}:PDPrefillServer.__init__", PREFILL_SERVER, "llm_config", "engine_cls")
    assert_takes(
        f"{servers}:PDDecodeServer.__init__",
        DECODE_SERVER,
        "llm_config",
        "prefill_server",
        "engine_cls",
    )
    find(f"{servers}:DPServer", PREFILL_SERVER)


def test_the_plain_servers_application_is_what_the_decode_server_returns_to() -> None:
    server = "ray.serve.llm.deployment:LLMServer"
    find(f"{server}.__serve_build_asgi_app__", DECODE_SERVER)
    find(f"{server}.check_health", PREFILL_SERVER)


def test_pd_serving_args_are_the_ones_that_build_app_accepts() -> None:
    fields = set(find("headrace_engine.ray.llm:PDServingArgs", PLATFORM_RAY).model_fields)
    ours = {
        "prefill_config",
        "decode_config",
        "ingress_cls_config",
        "ingress_deployment_config",
    }
    assert fields == ours, f"Ray's P/D app takes {sorted(fields)} now: mend {APP}"


def test_builders_take_a_deployment_class_and_what_is_bound_to_it() -> None:
    wanted = ("llm_config", "bind_kwargs", "override_serve_options", "deployment_cls")
    assert_takes("ray.serve.llm:build_llm_deployment", APP, *wanted)
    assert_takes("ray.serve.llm:build_dp_deployment", APP, *wanted)
    find("ray.serve.llm.ingress:OpenAiIngress", DROP_IN)


def test_a_handle_reaches_every_replica() -> None:
    mend = "platform/headrace/gateway/serve_backend/replica_calls.py"
    assert_takes("ray.serve.handle:DeploymentHandle.broadcast", mend, "method_name", "args")
    response = find("ray.serve.handle:DeploymentBroadcastResponse", mend)
    wanted = {"timeout_s", "return_exceptions"}
    assert wanted <= set(parameters(response.results_async)), f"mend {mend}"


# vLLM

ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"


def test_vllms_handlers_render_a_request_without_an_http_request() -> None:
    from headrace_engine.vllm.openai_app import HANDLERS, request_model

    routes = "vllm.entrypoints.generate.api_router"
    source = inspect.getsource(importlib.import_module(routes))
    classes = {
        "/v1/chat/completions": "chat_completion.serving:OpenAIServingChat",
        "/v1/completions": "completion.serving:OpenAIServingCompletion",
        "/v1/responses": "responses.serving:OpenAIServingResponses",
        "/v1/messages": "vllm.entrypoints.anthropic.serving:AnthropicServingMessages",
    }
    assert classes.keys() == HANDLERS.keys()
    for target, (attribute, method) in HANDLERS.items():
        assert f"state.{attribute} = " in source, f"{attribute} is gone: mend {RENDERING}"
        name = classes[target]
        name = name if name.startswith("vllm.") else f"vllm.entrypoints.openai.{name}"
        takes = parameters(find(f"{name}.{method}", RENDERING))
        assert list(takes) == ["self", "request", "raw_request"], f"mend {RENDERING}"
        assert takes["raw_request"].default is None, f"mend rendered in {RENDERING}"
        assert "stream" in request_model(target).model_fields, f"mend rendered in {RENDERING}"


def test_generate_takes_prompt_parameters_and_id() -> None:
    generate = find(f"{ASYNC_LLM}.generate", DECODE_VLLM)
    names = list(parameters(generate))
    assert names[:4] == ["self", "prompt", "sampling_params", "request_id"], (
        f"generate takes {names} now: mend {DECODE_VLLM}"
    )
    assert inspect.isasyncgenfunction(generate), f"generate is no generator: {DECODE_VLLM}"
    wanted = ("lora_request", "trace_headers", "priority")
    assert_takes(f"{ASYNC_LLM}.generate", DECODE_VLLM, *wanted)


def test_kv_that_nobody_pulls_can_be_given_back() -> None:
    method = f"{ASYNC_LLM}.notify_kv_transfer_request_rejected"
    names = list(parameters(find(method, DECODE_VLLM)))
    assert names[:3] == ["self", "request_id", "kv_transfer_params"], (
        f"{method} takes {names} now: mend {DECODE_VLLM}"
    )


def test_an_engine_is_made_from_a_config_and_stat_loggers() -> None:
    assert_takes(
        f"{ASYNC_LLM}.__init__",
        ENGINE_VLLM,
        "vllm_config",
        "executor_class",
        "log_stats",
        "log_requests",
        "stat_loggers",
    )
    find("vllm.v1.executor.abstract:Executor.get_class", ENGINE_VLLM)
    find("vllm.v1.metrics.ray_wrappers:RayPrometheusStatLogger", ENGINE_VLLM)


def test_stat_loggers_are_called_as_ours_is_written() -> None:
    base = "vllm.v1.metrics.loggers:StatLoggerBase"
    theirs = list(parameters(find(f"{base}.record", ENGINE_VLLM)))
    ours = list(parameters(find("headrace_engine.vllm.engine:MeterStatLogger.record", "")))
    assert theirs == ours, f"StatLoggerBase.record takes {theirs} now: mend {ENGINE_VLLM}"
    assert_takes(f"{base}.__init__", ENGINE_VLLM, "vllm_config", "engine_index")


def test_the_statistics_of_a_step() -> None:
    stats = "vllm.v1.metrics.stats"
    assert_fields(
        f"{stats}:SchedulerStats",
        ENGINE_VLLM,
        "num_running_reqs",
        "num_waiting_reqs",
        "num_skipped_waiting_reqs",
        "kv_cache_usage",
        "iteration_details",
        "kv_connector_stats",
    )
    assert_fields(
        f"{stats}:SchedulerIterationDetails",
        ENGINE_VLLM,
        "num_ctx_tokens",
        "num_generation_requests",
        "elapsed_ms",
        "is_dummy",
        "num_encoder_inputs",
    )
    iteration = find(f"{stats}:IterationStats", ENGINE_VLLM)()
    for name in ("num_generation_tokens", "time_to_first_tokens_iter", "prompt_token_stats"):
        assert hasattr(iteration, name), f"IterationStats.{name} is gone: mend {ENGINE_VLLM}"
    assert hasattr(iteration.prompt_token_stats, "computed"), f"mend {ENGINE_VLLM}"


def test_steps_are_detailed_on_request() -> None:
    assert_fields(
        "vllm.config:ObservabilityConfig", ENGINE_VLLM, "enable_logging_iteration_details"
    )


def test_what_the_transfer_statistics_are_called() -> None:
    module = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats"
    data = find(f"{module}:NixlKVConnectorStats", ENGINE_VLLM)().data
    wanted = {"bytes_transferred", "transfer_duration", "num_failed_transfers"}
    assert wanted <= set(data), f"NIXL's statistics are {sorted(data)} now: mend {ENGINE_VLLM}"


def test_a_requests_times_are_named_as_the_prefill_server_reads_them() -> None:
    assert_fields(
        "vllm.v1.metrics.stats:RequestStateStats",
        PREFILL_SERVER,
        "queued_ts",
        "scheduled_ts",
        "first_token_ts",
    )


def test_what_an_output_carries() -> None:
    assert_takes(
        "vllm:RequestOutput.__init__",
        PREFILL_SERVER,
        "outputs",
        "metrics",
        "num_cached_tokens",
        "kv_transfer_params",
    )
    assert_fields("vllm.outputs:CompletionOutput", DECODE_VLLM, "token_ids")


def test_what_sampling_parameters_carry() -> None:
    from vllm import SamplingParams

    params = SamplingParams(extra_args={PARAMS_KEY: {"a": 1}, "other": 2})
    for name in ("n", "prompt_logprobs", "extra_args", "max_tokens", "detokenize"):
        assert hasattr(params, name), f"SamplingParams.{name} is gone: mend {DECODE_VLLM}"


def test_a_prompt_of_tokens_is_a_dict_with_ids_and_salt() -> None:
    from vllm.inputs import TokensPrompt

    fields = set(TokensPrompt.__annotations__)
    for name in ("prompt_token_ids", "cache_salt", "multi_modal_data"):
        inherited = any(name in getattr(b, "__annotations__", {}) for b in TokensPrompt.__mro__)
        keys = fields | set(TokensPrompt.__optional_keys__) | set(TokensPrompt.__required_keys__)
        assert inherited or name in keys, f"TokensPrompt.{name} is gone: mend {DECODE_VLLM}"


def test_transfer_parameters_travel_where_the_scheduler_reads_them() -> None:
    source = inspect.getsource(find("vllm.v1.request:Request.__init__", HANDOFF))
    assert f'"{PARAMS_KEY}"' in source, f"Request reads them elsewhere: mend {HANDOFF}"


def test_the_words_of_nixls_handoff() -> None:
    module = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler"
    source = inspect.getsource(find(f"{module}:NixlPullConnectorScheduler", HANDOFF))
    for word in produce_params():
        assert f'"{word}"' in source or f"{word}=" in source, f"{word} is unknown: mend {HANDOFF}"


def test_the_connector_is_there_under_its_name() -> None:
    factory = find(
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory",
        "platform/headrace/config/app_args.py",
    )
    assert "NixlConnector" in factory._registry


def test_the_executor_that_keeps_its_worker_in_the_engines_process() -> None:
    mend = "engine/headrace_engine/vllm/executor.py"
    executor = "vllm.v1.executor.uniproc_executor:UniProcExecutor"
    assert_takes(f"{executor}.execute_model", mend, "scheduler_output", "non_block")
    source = inspect.getsource(find("vllm.v1.engine.core:EngineCore.step", mend))
    assert ".execute_model(scheduler_output, non_block=True)" in source, (
        f"the engine core runs its steps another way: mend {mend}"
    )
    assert "future.result()" in source, f"the step is no longer asked for: mend {mend}"


def test_nixls_handshakes_are_answered_by_a_method_that_tells_when_it_listens() -> None:
    mend = "engine/headrace_engine/pull_proof/scheduler_connector.py"
    module = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler"
    scheduler = f"{module}:NixlBaseConnectorScheduler"
    assert_takes(
        f"{scheduler}._nixl_handshake_listener",
        mend,
        *("encoded_data", "ready_event", "stop_event", "host", "port"),
    )
    source = inspect.getsource(find(f"{scheduler}.set_xfer_handshake_metadata", mend))
    for words in ("target=self._nixl_handshake_listener", "ready_event.wait()"):
        assert words in source, f"the listener is begun otherwise: mend {mend}"


def test_the_ports_of_nixls_handshake_can_be_chosen() -> None:
    from vllm import envs

    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in envs.environment_variables, f"mend {ENGINE_RAY}"
    find("ray.serve.llm:LLMConfig.get_engine_config", ENGINE_RAY)


def test_an_engine_can_be_shut_down() -> None:
    find(f"{ENGINE}.shutdown", ENGINE_RAY)
    find(f"{ASYNC_LLM}.shutdown", ENGINE_RAY)


def test_the_nixl_agent_that_is_made_again_to_sleep() -> None:
    mend = "engine/headrace_engine/kv_transfer/nixl_cpu_usage.py"
    folder = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
    assert_takes(f"{folder}:NixlConnector.__init__", mend, "vllm_config", "role", "kv_cache_config")
    worker = find(f"{folder}.base_worker:NixlBaseConnectorWorker", mend)
    made = inspect.getsource(worker.__init__)
    assert "self.nixl_wrapper = nixl_wrapper_cls(" in made, f"the agent is made elsewhere: {mend}"
    assert ".register" not in made, f"memory is registered before the agent is replaced: {mend}"
    config = find("nixl._bindings:nixlAgentConfig", mend)()
    for name in ("useProgThread", "pthrDelay", "captureTelemetry"):
        assert hasattr(config, name), f"nixlAgentConfig.{name} is gone: mend {mend}"
    agent = inspect.getsource(find("nixl._api:nixl_agent.__init__", mend))
    assert "self.agent = nixlBind.nixlAgent(agent_name, agent_config)" in agent, f"mend {mend}"
    assert "agent_config.pthrDelay = 0" in agent, f"NIXL's thread sleeps by itself now: {mend}"


def test_vllm_bounds_the_tokens_of_one_prompt_in_a_step_by_a_threshold() -> None:
    config = find("vllm.config.scheduler:SchedulerConfig", ENGINE_VLLM)
    names = {field.name for field in dataclasses.fields(config)}
    assert {"long_prefill_token_threshold", "enable_chunked_prefill"} <= names
    schedule = find("vllm.v1.core.sched.scheduler:Scheduler.schedule", ENGINE_VLLM)
    source = inspect.getsource(schedule)
    assert source.count("self.scheduler_config.long_prefill_token_threshold") == 1
    assert "if num_eligible_reqs > 1" in source, "a prompt that is alone has all of a step"
    assert source.count("num_new_tokens = long_prefill_token_threshold") == 2


@pytest.mark.parametrize(
    ("step", "given", "longest", "most", "spare"),
    [
        (2048, 0, 8192, 1920, 128),
        (2048, 0, 1000, 2048, 0),  # no prompt takes more than a step
        (2048, 500, 8192, 500, 1548),
        (2048, 4000, 8192, 2048, 0),
        (8, 0, 8192, 8, 0),
    ],
)
def test_a_step_keeps_room_beside_a_long_prompt(
    step: int, given: int, longest: int, most: int, spare: int
) -> None:
    from headrace_engine.vllm import engine as ours

    scheduler = SimpleNamespace(
        max_num_batched_tokens=step, long_prefill_token_threshold=given, enable_chunked_prefill=True
    )
    config: Any = SimpleNamespace(
        scheduler_config=scheduler, model_config=SimpleNamespace(max_model_len=longest)
    )
    ours.leave_room(config)
    assert ours.prompt_step_tokens(config) == most
    gate = ours.make_prefill_admission(config, EngineMeter())
    assert (gate._step_tokens, gate._spare_tokens) == (most, spare)


def test_vllm_frees_blocks_that_the_last_token_of_a_prompt_still_needs() -> None:
    """Were it not so, `ProvenScheduler._prefill_backoff` could go. Windows and chunks of 128."""
    mend = "engine/headrace_engine/pull_proof/scheduler_connector.py"
    managers = "vllm.v1.core.single_type_kv_cache_manager"
    window: Any = object.__new__(find(f"{managers}:SlidingWindowManager", mend))
    window.sliding_window, window.extra_retained_tokens = 128, 0
    chunks: Any = object.__new__(find(f"{managers}:ChunkedLocalAttentionManager", mend))
    chunks.attention_chunk_size = 128
    for manager, tokens, needed_from in ((window, 159, 31), (chunks, 256, 128)):
        assert manager.get_num_skipped_tokens(tokens) > needed_from, f"not needed: {mend}"
        assert manager.get_num_skipped_tokens(tokens - 1) <= needed_from, f"mend {mend}"


def test_the_connector_whose_pulls_are_proved() -> None:
    mend = "engine/headrace_engine/pull_proof/scheduler_connector.py"
    nixl = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
    scheduler = find(f"{nixl}.pull_scheduler:NixlPullConnectorScheduler", mend)
    worker = find(f"{nixl}.pull_worker:NixlPullConnectorWorker", mend)
    assert_takes(
        f"{nixl}.pull_worker:NixlPullConnectorWorker._read_blocks",
        *(mend, "read_spec", "dst_engine_id", "request_id", "remote_request_id"),
    )
    for half, names in (
        (scheduler, "set_xfer_handshake_metadata build_connector_meta request_finished"),
        (scheduler, "update_state_after_alloc get_num_new_matched_tokens"),
        (scheduler, "_prefill_backoff _get_remote_prefill_token_count"),
        (worker, "_read_blocks_for_req _handle_failed_transfer _cleanup_remote_engine"),
    ):
        for name in names.split():
            assert callable(getattr(half, name, None)), f"{half.__name__}.{name}: mend {mend}"
    made = inspect.getsource(find(f"{nixl}:NixlConnector.__init__", mend))
    assert "super().__init__(vllm_config, role, kv_cache_config)" in made, f"mend {mend}"
    read = inspect.getsource(worker._read_blocks)
    assert "self.nixl_wrapper.make_prepped_xfer(" in read and "notif_msg=notif_id" in read, mend
    finished = inspect.getsource(worker.get_transfer_results)
    assert "self._pop_done_transfers(self._recving_transfers)" in finished, f"mend {mend}"
    registered = inspect.getsource(worker.register_kv_caches)
    assert "self.nixl_wrapper.get_agent_metadata()" in registered, f"mend {mend}"


def test_the_documented_waits_are_those_of_the_code() -> None:
    from headrace.config.integrity import IntegritySection
    from headrace.config.schema import RouterSettings
    from headrace_decode.server import PROBE_INTERVAL_S
    from headrace_engine.pull_proof.proving_agent import SPIN_S

    mend = "docs/integrity.md"
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in Path(mend).read_text().split("## Every wait")[1].split("##")[0].splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ][1:]
    told = {wait: (setting.strip("`"), default) for wait, setting, default, _ in rows}
    router, integrity = RouterSettings(), IntegritySection()
    for setting, default in told.values():
        section, _, name = setting.partition(".")
        if section in ("router", "integrity"):
            value = getattr({"router": router, "integrity": integrity}[section], name)
            assert default == f"{value:g} s", f"{setting} is {value}: mend {mend}"
    nixl = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
    worker = find(f"{nixl}.base_worker:NixlBaseConnectorWorker", mend)
    scheduler = find(f"{nixl}.base_scheduler:NixlBaseConnectorScheduler", mend)
    assert "zmq.RCVTIMEO, 5000)" in inspect.getsource(worker._nixl_handshake), mend
    assert told["handshake, each rank"][1] == "5 s"
    made = inspect.getsource(scheduler.__init__)
    assert '"kv_lease_duration", 30' in made and "self._kv_lease_duration // 6" in made, mend
    assert '"engine_ttl", 3600.0' in inspect.getsource(worker.__init__), mend
    assert "kv_lease_duration * 2 // 3" in inspect.getsource(worker.__init__), mend
    assert told["lease of the blocks"][1] == "30 s"
    assert told["probe of a failed prefill replica"][1] == f"{PROBE_INTERVAL_S:g} s"
    assert told["records, within one engine step"][1] == f"{1e3 * SPIN_S:g} ms"
