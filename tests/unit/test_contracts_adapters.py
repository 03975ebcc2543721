"""vLLM loads LoRA adapters, and finds them by name, as `vllm.llm` expects."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace_engine.adapters.registry import AdapterVersion
from headrace_engine.adapters.settings import AdapterSettings
from headrace_engine.adapters.sources import AdapterError
from headrace_engine.serving.added_adapters import AddedAdapters
from headrace_engine.serving.replica_adapters import ReplicaAdapters
from headrace_engine.vllm.kv_cache import BlockHasher
from headrace_engine.vllm.llm import VllmAdapters, lora_request
from tests.support.contracts import assert_takes, find
from tests.support.tiny import make_adapter

MEND = "engine/headrace_engine/vllm/llm.py"
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


class Llm:
    """An engine that refuses adapters."""

    def __init__(self, *, errored: bool) -> None:
        from vllm.config import LoRAConfig

        self.vllm_config = SimpleNamespace(lora_config=LoRAConfig(max_loras=2))
        self.errored = errored

    async def add_lora(self, request: Any) -> bool:
        raise ValueError("LoRA rank 64 is greater than max_lora_rank 16.\nTraceback")


async def test_an_engine_that_refuses_an_adapter_says_why_in_one_line() -> None:
    with pytest.raises(AdapterError, match=r"^LoRA rank 64 is greater than max_lora_rank 16\.$"):
        await VllmAdapters(cast(Any, Llm(errored=False))).load(VERSION)


async def test_a_dead_engine_is_not_the_adapters_fault() -> None:
    with pytest.raises(ValueError, match="LoRA rank 64"):
        await VllmAdapters(cast(Any, Llm(errored=True))).load(VERSION)


async def test_a_replica_loads_what_administrators_add_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    values: dict[str, bytes] = {}
    added = AddedAdapters("app", values.get, values.__setitem__)
    llm: Any = Llm(errored=False)
    replica = ReplicaAdapters(AdapterSettings("base"), llm, added, "d1")
    folder = make_adapter(tmp_path / "sql", seed=1)
    answer = await replica.change({"sql": str(folder)}, "sql")
    assert answer["replica_id"] == "d1" and "rank 64" in answer["error"]

    async def add_lora(request: Any) -> bool:
        return True

    llm.add_lora = add_lora
    assert await replica.change({"sql": str(folder)}, "sql") == {"replica_id": "d1"}
    assert replica.registry.snapshot()["loaded"] == ["sql"]
    assert "error" in await replica.change({"base": str(folder)}, "base")
    assert await replica.change({}, None) == {"replica_id": "d1"}
    assert await replica.registry.names() == []
    replica.close()


async def test_a_replica_does_not_start_with_an_adapter_that_it_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    added = AddedAdapters("app", lambda key: None, lambda key, value: None)
    settings = AdapterSettings("base", {"sql": str(tmp_path / "none")})
    replica = ReplicaAdapters(settings, cast(Any, Llm(errored=False)), added, "d1")
    with pytest.raises(AdapterError, match=r"^the LoRA adapter 'sql': .*none cannot be read"):
        await replica.start()
    replica.close()
