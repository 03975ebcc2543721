"""What the configuration of a model with recurrent layers keeps: the store if it can keep their
states, and a drafter if they stay right beside it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig

from headrace_engine.vllm import recurrent_models
from headrace_engine.vllm.recurrent_models import leave_out_store, why_no_speculation
from tests.support.contracts import assert_fields, find

MEND = "engine/headrace_engine/vllm/recurrent_models.py"
STORE = {
    "kv_connector": "HeadraceConnector",
    "kv_connector_module_path": "headrace_engine.store_connector",
    "kv_role": "kv_both",
}
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "headrace_engine.pull_proof.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
OTHER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def config(
    *children: dict[str, Any], hybrid: bool = True, mode: str = "none", **fields: Any
) -> Any:
    """An engine's configuration with these connectors; without prefix caching, so that the store
    cannot keep states."""
    transfer = KVTransferConfig(**children[0], engine_id="e")
    if len(children) > 1:
        extra = {"connectors": [*children]}
        transfer = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            engine_id="e",
            kv_connector_extra_config=extra,
        )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_hybrid=hybrid,
            is_attention_free=False,
            architecture="GraniteMoeHybridForCausalLM",
            hf_text_config=SimpleNamespace(to_dict=lambda: fields),
        ),
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
        kv_transfer_config=transfer,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
    )


def test_the_store_stays_where_vllm_keeps_states_at_block_boundaries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    for children in ([NIXL, STORE], [STORE]):
        made = config(*children, mode="align")
        before = made.kv_transfer_config
        assert leave_out_store(made) is None and made.kv_transfer_config is before
        assert made.scheduler_config.disable_hybrid_kv_cache_manager is False
    assert os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] == "DS"


@pytest.mark.parametrize(
    ("attention_free", "fields", "codec", "why"),
    [
        (True, {}, "raw", "beside attention only"),
        (False, {"sliding_window": 128}, "raw", "beside full attention, not sliding windows"),
        (False, {}, "fp8", "with codec: raw only"),
    ],
)
def test_it_is_left_out_beside_what_it_cannot_keep(
    attention_free: bool, fields: dict[str, Any], codec: str, why: str
) -> None:
    store = STORE | {"kv_connector_extra_config": {"codec": codec}}
    made = config(store, mode="align", **fields)
    made.model_config.is_attention_free = attention_free
    found = leave_out_store(made)
    assert found is not None and why in found and made.kv_transfer_config is None


def test_nixl_stays_alone_with_the_engines_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    made = config(NIXL, STORE)
    why = leave_out_store(made)
    assert why is not None and "GraniteMoeHybridForCausalLM has layers that keep a state" in why
    assert "of engines with a prefix cache only" in why
    kept = made.kv_transfer_config
    assert (kept.kv_connector, kept.engine_id) == ("NixlConnector", "e")
    assert kept.kv_load_failure_policy == "recompute"
    assert made.scheduler_config.disable_hybrid_kv_cache_manager is False
    assert os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] == "DS", (
        "the only one that NIXL's connector takes"
    )


def test_the_store_alone_leaves_nothing() -> None:
    made = config(STORE)
    assert leave_out_store(made) is not None and made.kv_transfer_config is None


def test_several_others_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    made = config(NIXL, STORE, OTHER)
    assert leave_out_store(made) is not None
    assert made.kv_transfer_config.kv_connector_extra_config["connectors"] == [NIXL, OTHER]


def test_an_indexer_leaves_out_the_store_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT", raising=False)
    made = config(NIXL, STORE, hybrid=False, index_topk=2048)
    why = leave_out_store(made)
    assert why is not None and "an indexer beside MLA" in why
    assert made.kv_transfer_config.kv_connector == "NixlConnector"
    assert made.scheduler_config.disable_hybrid_kv_cache_manager is True
    assert "VLLM_SSM_CONV_STATE_LAYOUT" not in os.environ


def test_blending_of_stored_kv_leaves_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the store, and an engine with it would not start."""
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")
    children = NIXL, STORE, STORE | {"kv_connector": "StoredBlendingConnector"}
    made = config(*children)
    assert leave_out_store(made) is not None
    assert made.kv_transfer_config.kv_connector == "NixlConnector"
    kept = config(*children, mode="align")
    assert leave_out_store(kept) is None, "blending leaves a store that keeps states"
    assert kept.kv_transfer_config.kv_connector_extra_config["connectors"] == [NIXL, STORE]


@pytest.mark.parametrize("made", [config(NIXL, STORE, hybrid=False), config(NIXL), config(OTHER)])
def test_other_engines_are_not_changed(made: Any) -> None:
    before = made.kv_transfer_config
    assert leave_out_store(made) is None and made.kv_transfer_config is before
    assert made.scheduler_config.disable_hybrid_kv_cache_manager


@pytest.mark.parametrize(
    ("method", "hybrid", "on_cpu", "why"),
    [
        (None, True, True, None),
        ("custom_class", False, True, None),
        ("custom_class", True, True, "would end, or answer wrongly"),
        ("custom_class", True, False, "no prefill engine"),
        ("ngram", True, True, "would end, or answer wrongly"),
        ("ngram", True, False, None),
    ],
)
def test_a_drafter_is_left_out_where_states_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
    method: str | None,
    hybrid: bool,
    on_cpu: bool,
    why: str | None,
) -> None:
    monkeypatch.setattr(recurrent_models, "runs_on_cpu", lambda: on_cpu)
    made = config(NIXL, hybrid=hybrid)
    made.speculative_config = None if method is None else SimpleNamespace(method=method)
    found = why_no_speculation(made)
    assert found is None if why is None else why in str(found)


def test_vllms_runner_on_cpus_lacks_the_kernel_that_keeps_the_states_of_accepted_drafts() -> None:
    kernel = find("vllm.v1.worker.mamba_utils:postprocess_mamba_fused_kernel", MEND)
    with pytest.raises(TypeError, match="not subscriptable"):
        kernel[(1,)]


def test_states_of_an_engine_that_drafts_have_another_shape_and_nixl_does_not_look() -> None:
    shapes = find(
        "vllm.model_executor.layers.mamba.mamba_utils:"
        "MambaStateShapeCalculator.gated_delta_net_state_shape",
        MEND,
    )
    plain, drafts = (shapes(1, 2, 4, 64, 64, 4, num_spec)[0] for num_spec in (0, 3))
    assert plain != drafts
    factors = find(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata:"
        "_get_speculative_compatibility_factors",
        MEND,
    )
    drafter = SimpleNamespace(use_eagle=lambda: False)
    assert factors(SimpleNamespace(speculative_config=drafter)) is None


def test_vllm_says_which_models_have_a_state_and_lets_the_manager_be_chosen() -> None:
    for name in ("is_hybrid", "is_attention_free", "architecture"):
        assert isinstance(find(f"vllm.config:ModelConfig.{name}", MEND), property), f"mend {MEND}"
    assert_fields("vllm.config:SchedulerConfig", MEND, "disable_hybrid_kv_cache_manager")
    assert_fields("vllm.config:CacheConfig", MEND, "mamba_cache_mode")
