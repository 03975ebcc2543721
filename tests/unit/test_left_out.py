"""What an engine runs without, and why, is in one place, whichever part decides it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.app import _left_out
from headrace.deploy.speculative_decoding import why_no_speculation
from headrace.deploy.store import why_no_store
from headrace.observability import engine as engine_metrics
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.attention_backend.worker import AttentionWorkerPart
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_decode.llm.vllm_engine import PlannedVLLMEngine
from headrace_engine.extensions.extension import EXTENSIBLE_WORKER
from headrace_engine.kv_transfer.compatibility import KvKind
from headrace_engine.ray import engine as ray_engine
from headrace_engine.ray.engine import LEFT_OUT_KEY, MeteredVLLMEngine
from tests.unit.test_speculation_report_poller import Recorded

NIXL = {"kv_transfer_config": {"kv_connector": "NixlConnector"}}
STORE = {"name": "kv"}


class Workers:
    """The frontend of an engine whose workers answer so."""

    def __init__(self, withdrawn: dict[str, str], resumes: bool = True, **told: str) -> None:
        self._told, self._withdrawn = told, withdrawn
        self.why_not_resumable = None if resumes else "it runs with a scheduler of its own"

    async def collective_rpc(self, method: str) -> list[dict[str, str]]:
        assert method == "headrace_unsupported"
        return [self._told]

    async def withdraw_unsupported_techniques(self) -> dict[str, str]:
        return self._withdrawn


def engine(
    kind: type[MeteredVLLMEngine],
    llm: Workers,
    *,
    unidentified: str = "",
    stores: bool = True,
    worker: str = EXTENSIBLE_WORKER,
) -> Any:
    made = cast(Any, object.__new__(kind))
    connector = "HeadraceConnector" if stores else "NixlConnector"
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=STORE)
    made.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=worker), kv_transfer_config=transfer
    )
    made.kv_kind, made.llm = KvKind("d", why_unidentified=unidentified), llm
    return made


async def test_the_workers_of_either_role_tell_which_techniques_they_cannot_do() -> None:
    llm = Workers({"sparse": "no"}, sparse="no", offload="too small")
    wanted = {"sparse": "no", "offload": "too small"}
    assert await engine(MeteredVLLMEngine, llm).find_left_out() == wanted
    assert await engine(PlannedVLLMEngine, llm).find_left_out() == wanted
    other = engine(MeteredVLLMEngine, llm, worker="vllm.v1.worker.cpu_worker.CPUWorker")
    assert await other.find_left_out() == {}


def test_an_engine_that_must_not_draft_is_configured_again_without_a_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

    engine_kwargs: dict[str, Any] = {"speculative_config": {"method": "custom_class"}}
    own = SimpleNamespace(engine_kwargs=engine_kwargs, frontend_kwargs={})

    def prepare(self: Any, context: Any) -> Any:
        drafter = own.engine_kwargs["speculative_config"]
        model = SimpleNamespace(is_hybrid=True, is_attention_free=False, architecture="Jamba")
        model.hf_text_config = SimpleNamespace(to_dict=dict)
        return (
            None,
            None,
            SimpleNamespace(
                model_config=model,
                cache_config=SimpleNamespace(enable_prefix_caching=True),
                kv_transfer_config=None,
                speculative_config=drafter and SimpleNamespace(**drafter),
            ),
        )

    monkeypatch.setattr(VLLMEngine, "_prepare_engine_config", prepare)
    monkeypatch.setattr(ray_engine, "set_parsers", lambda *arguments: None)
    made = cast(Any, object.__new__(MeteredVLLMEngine))
    made.left_out = {}
    made.llm_config = SimpleNamespace(get_engine_config=lambda: own, engine_kwargs={})
    _, _, config = made._prepare_engine_config(None)
    assert config.speculative_config is None
    assert "Jamba" in made.left_out["speculation"]


async def test_kv_without_an_identity_is_neither_pulled_nor_stored() -> None:
    why = "the weights are a pickle"
    for stores, parts in ((True, {"remote_prefill", "store"}), (False, {"remote_prefill"})):
        made = engine(MeteredVLLMEngine, Workers({}), unidentified=why, stores=stores)
        assert await made.find_left_out() == dict.fromkeys(parts, why)


async def test_streams_that_cannot_be_resumed_are_told() -> None:
    found = await engine(PlannedVLLMEngine, Workers({}, resumes=False)).find_left_out()
    assert found == {"resume": "it runs with a scheduler of its own"}


def part(sparse: str, compresses: bool, offload_gib: float) -> Any:
    settings = SparseSettings(sparse, offload_gib=offload_gib)
    compression = CompressionSettings("request", 0.5) if compresses else None
    return AttentionWorkerPart(None, settings, compression)


@pytest.mark.parametrize(
    ("configured", "told"),
    [
        (("auto", True, 1.0), {"sparse", "compression", "offload"}),
        (("auto", False, 0.0), {"sparse"}),
        (("off", True, 0.0), {"compression"}),
    ],
)
def test_an_engine_that_attends_densely_tells_what_was_configured(
    configured: tuple[str, bool, float], told: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    made = part(*configured)
    made._attend_densely("sliding window")
    assert made.unsupported() == dict.fromkeys(told, "sliding window")


@pytest.mark.parametrize(
    ("kwargs", "stored"),
    [
        (NIXL, True),
        ({}, False),
        ({"kv_transfer_config": {"kv_connector": "MultiConnector"}}, False),
    ],
)
def test_the_store_works_beside_nixl_alone(kwargs: dict[str, Any], stored: bool) -> None:
    assert (why_no_store(kwargs) is None) == stored


def test_an_engine_with_a_drafter_of_its_own_keeps_it() -> None:
    assert why_no_speculation({}) is None
    assert "drafts by it" in str(why_no_speculation({"speculative_config": {"method": "ngram"}}))


def test_what_an_apps_arguments_leave_out_is_told_for_each_role() -> None:
    kwargs = {"speculative_config": {"method": "ngram"}}
    both = {"store": True, "speculation": True}
    assert _left_out(kwargs, **both).keys() == {"store", "speculation"}
    assert _left_out(kwargs, store=True, speculation=False).keys() == {"store"}
    assert _left_out(NIXL, **both) == {}
    assert _left_out(kwargs, store=False, speculation=False) == {}


def test_an_engine_begins_with_what_its_apps_arguments_leave_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

    monkeypatch.setattr(VLLMEngine, "__init__", lambda self, config: None)
    monkeypatch.setattr(MeteredVLLMEngine, "_choose_side_channel", staticmethod(lambda c: None))
    reasons = {"speculation": "the engine drafts"}
    told = SimpleNamespace(experimental_configs={LEFT_OUT_KEY: reasons})
    made = MeteredVLLMEngine(told)
    assert made.left_out == reasons and made.left_out is not reasons
    assert MeteredVLLMEngine(SimpleNamespace(experimental_configs={})).left_out == {}


def test_one_gauge_has_a_sample_for_each_part_and_no_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_metrics, "Gauge", Recorded)
    monkeypatch.setattr(Recorded, "values", {})
    engine_metrics.export_left_out({"store": "the model keeps states", "sparse": "a window"})
    name = "headrace_engine_left_out"
    assert Recorded.values == {(name, "store"): 1.0, (name, "sparse"): 1.0}
