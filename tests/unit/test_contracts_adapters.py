"""vLLM loads LoRA adapters, and finds them by name, as `vllm.adapters` expects."""

from __future__ import annotations

import inspect
from typing import Any

from headrace_engine.adapters.registry import AdapterVersion
from headrace_engine.vllm.adapters import VllmAdapters, lora_request
from headrace_engine.vllm.kv_cache import BlockHasher
from tests.support.contracts import assert_takes, find

MEND = "engine/headrace_engine/vllm/adapters.py"
VERSION = AdapterVersion("sql", 7, "0" * 32, "/adapters/sql", "/cache/" + "0" * 32)


def test_requests_find_adapters_in_the_registered_ones() -> None:
    serving = "vllm.entrypoints.serve.engine.serving:BaseServing"
    for method in ("_check_model", "_maybe_get_adapters"):
        source = inspect.getsource(find(f"{serving}.{method}", MEND))
        assert "request.model in self.models.lora_requests" in source, f"mend {MEND}"
    models = find("vllm.entrypoints.openai.models.serving:OpenAIServingModels.__init__", MEND)
    assert "self.lora_requests: dict[str, LoRARequest] = {}" in inspect.getsource(models)


def test_engines_load_adapters_by_number_and_drop_the_least_recently_used() -> None:
    assert_takes("vllm.v1.engine.async_llm:AsyncLLM.add_lora", MEND, "lora_request")
    manager = "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter"
    source = inspect.getsource(find(manager, MEND))
    assert "lora_request.lora_int_id not in self.list_adapters()" in source, f"mend {MEND}"
    assert "remove_oldest_adapter()" in source, f"mend {MEND}"
    config = find("vllm.config:LoRAConfig", MEND)(max_loras=2, max_cpu_loras=5)
    llm: Any = type("Llm", (), {"vllm_config": type("C", (), {"lora_config": config})})
    assert VllmAdapters(llm).capacity == 5


def test_the_files_of_an_adapter_are_the_two_that_are_copied() -> None:
    from headrace_engine.adapters.sources import CONFIG, WEIGHTS

    helper = find("vllm.lora.peft_helper:PEFTHelper.from_local_dir", MEND)
    assert f'"{CONFIG}"' in inspect.getsource(helper), f"mend {MEND}"
    model = find("vllm.lora.lora_model:LoRAModel.from_local_checkpoint", MEND)
    assert f'"{WEIGHTS}"' in inspect.getsource(model), f"mend {MEND}"


def test_a_version_is_a_request_whose_path_names_the_content() -> None:
    request = lora_request(VERSION)
    assert (request.lora_name, request.lora_int_id) == ("sql", 7)
    assert request.lora_path == VERSION.path and not request.load_inplace


def test_both_hashers_know_adapters_alike() -> None:
    lora, tokens = ("sql", VERSION.path), list(range(50))
    fast = BlockHasher("sha256_cbor", 16)
    slow = BlockHasher("sha256_cbor", 16)
    slow._fast = False
    for salt in ("", "tenant"):
        for adapter in (None, lora):
            assert fast(tokens, salt, adapter) == slow(tokens, salt, adapter)
    assert not set(fast(tokens, "", lora)) & set(fast(tokens, ""))
