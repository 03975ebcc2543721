"""What decode replicas take from vLLM beyond its documented interface is there, in the same shape:
refusals, grammars, transfer parameters.

Each test names the file to mend when an upgrade moves what it pins.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.adapters.snapshots import snapshot_root
from headrace_engine.kv_transfer.handoff import PARAMS_KEY
from tests.support.contracts import assert_fields, assert_takes, find

ENGINE_RAY = "engine/headrace_engine/ray/engine.py"
ENGINE_VLLM = "engine/headrace_engine/vllm/engine.py"
DECODE_VLLM = "decode/headrace_decode/llm/request_params.py"
PLATFORM_RAY = "engine/headrace_engine/ray/llm.py"
HANDOFF = "engine/headrace_engine/kv_transfer/handoff.py"
DECODE_SERVER = "decode/headrace_decode/server.py"
PREFILL_SERVER = "prefill/headrace_prefill/server.py"
APP = "platform/headrace/app.py"


def test_a_refusal_of_ours_is_answered_400_like_vllms_own() -> None:
    assert_takes("vllm.exceptions:VLLMValidationError.__init__", DECODE_VLLM, "parameter")
    error = find("vllm.exceptions:VLLMValidationError", DECODE_VLLM)("no", parameter="prompt")
    module = "vllm.entrypoints.serve.exception_handling.error_response"
    make = find(f"{module}:create_error_response", DECODE_VLLM)
    response = make(error)
    assert (response.error.code, response.error.param) == (400, "prompt"), f"mend {DECODE_VLLM}"


def test_what_a_request_says_that_the_engine_gave_up() -> None:
    reason = find("vllm.v1.engine:FinishReason", DECODE_VLLM)
    assert str(reason.ERROR) == "error", f"mend grammar_failed in {DECODE_VLLM}"


def test_what_the_guard_looks_into() -> None:
    mend = "decode/headrace_decode/llm/input_validation.py"
    wanted = ("json", "regex", "choice", "grammar", "structural_tag", "whitespace_pattern")
    assert_fields("vllm.sampling_params:StructuredOutputsParams", mend, *wanted)
    from vllm import SamplingParams

    for name in ("top_k", "stop_token_ids", "logit_bias", "structured_outputs"):
        assert hasattr(SamplingParams(), name), f"SamplingParams.{name} is gone: mend {mend}"
    find("vllm.config:ModelConfig.get_vocab_size", mend)


def test_a_grammar_is_checked_and_compiled_by_what_the_worker_calls() -> None:
    mend = "decode/headrace_decode/grammars/worker.py"
    backends = "vllm.v1.structured_output"
    for name, cls in (
        ("xgrammar", "XgrammarBackend"),
        ("guidance", "GuidanceBackend"),
        ("outlines", "OutlinesBackend"),
        ("lm_format_enforcer", "LMFormatEnforcerBackend"),
    ):
        backend = f"{backends}.backend_{name}:{cls}"
        assert_takes(backend, mend, "vllm_config", "tokenizer", "vocab_size")
        assert_takes(f"{backend}.compile_grammar", mend, "request_type", "grammar_spec")
    grammar = f"{backends}.backend_types:StructuredOutputGrammar"
    assert_takes(f"{grammar}.accept_tokens", mend, "request_id", "tokens")
    assert_takes(f"{grammar}.fill_bitmask", mend, "bitmask", "batch_index")
    find(f"{grammar}.is_terminated", mend)
    manager = inspect.getsource(find(f"{backends}:StructuredOutputManager.__init__", mend))
    assert "self.tokenizer = cached_tokenizer_from_config(" in manager, f"mend {mend}"
    assert_takes("vllm.tokenizers:cached_tokenizer_from_config", mend, "model_config")
    assert_takes(f"{backends}.request:get_structured_output_key", mend, "params")
    wanted = ("model_config", "speculative_config", "structured_outputs_config", "tokenizer")
    assert_takes("vllm.sampling_params:SamplingParams.verify", mend, *wanted)


def test_lark_grammars_for_tekken_tokenizers_are_left_to_guidance_as_vllm_does() -> None:
    from vllm import SamplingParams
    from vllm.tokenizers.mistral import MistralTokenizer

    from headrace_engine.vllm.structured_output import needs_guidance

    mend = "engine/headrace_engine/vllm/structured_output.py"
    tokenizer = object.__new__(MistralTokenizer)
    lark, ebnf = 'start: "a" | "b"', 'root ::= "a" | "b"'
    for tekken in (True, False):
        tokenizer.is_tekken = tekken
        assert needs_guidance(tokenizer, lark) is tekken
        assert not needs_guidance(tokenizer, ebnf)
    assert not needs_guidance(object(), lark)
    source = inspect.getsource(SamplingParams._validate_structured_outputs)
    assert "grammar_is_likely_lark(self.structured_outputs.grammar)" in source, f"mend {mend}"


def test_a_grammar_that_was_tried_is_not_parsed_again_on_the_event_loop() -> None:
    from vllm import SamplingParams

    from headrace_decode.llm.request_params import GRAMMAR_FIELDS, grammar_of, with_grammar

    assert_fields("vllm.sampling_params:StructuredOutputsParams", DECODE_VLLM, *GRAMMAR_FIELDS)
    source = inspect.getsource(find("vllm.v1.engine.input_processor:InputProcessor", DECODE_VLLM))
    assert source.count("self.structured_outputs_config") == 2, f"used elsewhere: {DECODE_VLLM}"
    source = inspect.getsource(find("vllm.v1.engine.async_llm:AsyncLLM.__init__", DECODE_VLLM))
    assert "self.input_processor = InputProcessor(" in source, f"mend {DECODE_VLLM}"
    spec = {"regex": "a+", "disable_any_whitespace": True}
    tried = with_grammar(SamplingParams(), {"spec": spec, "backend": "xgrammar", "automatic": True})
    assert grammar_of(tried) == spec
    assert tried.structured_outputs is not None
    assert tried.structured_outputs._backend == "xgrammar"
    validate = SamplingParams._validate_structured_outputs
    validate(tried, None, None, None)  # type: ignore[arg-type]  # without a config: nothing


# Our own adapters on top of all that


def test_transfer_parameters_are_taken_out_and_put_in() -> None:
    from vllm import SamplingParams

    from headrace_decode.llm.request_params import with_transfer_params, without_reserved

    told = inspect.getsource(find("vllm.v1.request:Request.__init__", "request_params.py"))
    assert '"kv_cache_report_mode"' in told, "vLLM has another name for it"
    names_memory = {PARAMS_KEY: {"do_remote_prefill": True}, "ec_transfer_params": {"a": 1}}
    again = {"kv_cache_report_mode": "full"}
    sent = SamplingParams(extra_args={**names_memory, **again, "mine": 1})
    clean = without_reserved(sent)
    assert clean.extra_args == {"mine": 1}
    assert sent.extra_args is not None and PARAMS_KEY in sent.extra_args, "the caller's is kept"
    assert without_reserved(clean) is clean
    pull = {"do_remote_prefill": True}
    pulling = with_transfer_params(clean, pull)
    assert pulling.extra_args == {"mine": 1, PARAMS_KEY: pull}
    assert pulling.extra_args[PARAMS_KEY] is not pull, "the engine changes its copy"
    assert clean.extra_args == {"mine": 1}


def lora(path: Any) -> Any:
    return SimpleNamespace(lora_path=str(path))


@pytest.mark.parametrize(
    ("prompt", "params", "kwargs", "says"),
    [
        ("text", {}, {}, "not plain token ids"),
        ({"prompt_token_ids": []}, {}, {}, "not plain token ids"),
        ({"prompt_token_ids": [1], "type": "embeds"}, {}, {}, "not plain token ids"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": 1}}, {}, {}, "not processed yet"),
        ({"prompt_token_ids": [1]}, {"n": 2}, {}, "n > 1"),
        ({"prompt_token_ids": [1]}, {"prompt_logprobs": 0}, {}, "log-probabilities"),
        ({"prompt_token_ids": [1]}, {}, {"lora_request": lora("/adapters/sql")}, "LoRA"),
        ({"prompt_token_ids": [1]}, {}, {"lora_request": lora(snapshot_root() / ("0" * 32))}, None),
        ({"prompt_token_ids": [1], "cache_salt": "x"}, {}, {"lora_request": None}, None),
        ({"prompt_token_ids": [1] * 9}, {}, {}, "longer than the cache"),
        ({"prompt_token_ids": [1] * 8}, {}, {}, None),
        ({"prompt_token_ids": [1]}, {"extra_args": {"compression": 0.3}}, {}, "drops KV while"),
    ],
)
def test_which_requests_must_stay(
    prompt: Any, params: dict[str, Any], kwargs: dict[str, Any], says: str | None
) -> None:
    from vllm import SamplingParams

    from headrace_decode.llm.engine_request import EngineRequest, why_local

    request = EngineRequest(prompt, SamplingParams(**params), "r", kwargs)
    why = why_local(request, 8, compresses_prompts=True)
    assert (why is None) if says is None else (why is not None and says in why)


def test_a_renderer_names_media_by_the_options_of_their_loader() -> None:
    """`process_media_by_tenant` makes the tenant one of them, and keeps processed media."""
    where, base = "engine/headrace_engine/vllm/llm.py", "vllm.renderers.base:BaseRenderer"
    made = inspect.getsource(find(f"{base}.__init__", where))
    for name in ("_mm_processor_cache", "_mm_processor_only_cache", "_process_multimodal_async"):
        assert f"self.{name}" in made, f"BaseRenderer.{name} is gone: mend {where}"
    rendered = inspect.getsource(find(f"{base}._process_tokens_async", where))
    assert "media_io_kwargs=prompt" in rendered, f"they are passed otherwise: mend {where}"
    processing = "vllm.multimodal.processing"
    hashed = inspect.getsource(find(f"{processing}.inputs:ProcessorInputs.get_mm_hashes", where))
    assert '"media_io_kwargs": media_io_kwargs' in hashed, f"they are not hashed: mend {where}"
    processor = inspect.getmodule(find(f"{processing}.processor:BaseMultiModalProcessor", where))
    assert processor is not None
    uses = inspect.getsource(processor).count("media_io_kwargs")
    assert uses == 2, f"they do more than being hashed: mend {where}"
