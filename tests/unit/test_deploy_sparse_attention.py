"""Sparse attention in an app's configuration, in its engines' arguments and in requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from headrace.config import AppSection
from headrace.config.techniques import (
    BlendingSection,
    CompressionSection,
    SparseSection,
    TechniquesSection,
)
from headrace.deploy.blending import add_blending
from headrace.deploy.sparse_attention import add_sparse_attention
from headrace_decode.attention.settings import SparseSettings, settings_of
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_decode.compression.engine.settings import settings_of as bounded_settings_of
from headrace_decode.llm.request_params import with_keep_ratio, with_technique
from headrace_decode.speculative.settings import engine_arguments
from headrace_decode.techniques import (
    COMPRESSION,
    SPARSE,
    LossyMode,
    RequestedTechniques,
    TechniqueError,
    applied_techniques,
    keep_ratio_in,
    lossy_mode_of,
    offered_techniques,
    requested_techniques,
    salt_with_technique,
)
from headrace_engine.connector.identity.engine_identity import device_identity
from headrace_engine.extensions.extension import EXTENSIBLE_WORKER
from headrace_kvstore.identity.salts import is_isolated
from tests.unit.test_deploy_blending import engine as storing_engine


def sparse(**fields: Any) -> TechniquesSection:
    return TechniquesSection(sparse=SparseSection(**fields))


ON = sparse(mode="request")
SPECULATING = engine_arguments(4)["worker_cls"]


# ---- configuration --------------------------------------------------------------------------


def test_it_is_off_and_changes_nothing_by_default() -> None:
    engine: dict[str, Any] = {"worker_cls": "mine.Worker"}
    add_sparse_attention(AppSection().techniques, [engine])
    assert engine == {"worker_cls": "mine.Worker"}


def test_both_roles_get_the_worker_and_are_told() -> None:
    engines: list[dict[str, Any]] = [{}, {"additional_config": {"other": 1}}]
    add_sparse_attention(sparse(mode="auto", keep_ratio=0.2, page_tokens=16), engines)
    for engine in engines:
        assert settings_of(engine["additional_config"]) == SparseSettings("auto", 0.2, 16)
        assert engine["worker_cls"] == EXTENSIBLE_WORKER
    assert engines[1]["additional_config"]["other"] == 1


def test_only_decode_engines_let_kv_leave_the_cache() -> None:
    prefill: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    add_sparse_attention(sparse(mode="auto", offload_gib=2), [prefill, decode], [decode])
    told = [settings_of(engine["additional_config"]) for engine in (prefill, decode)]
    assert [each.offload_gib for each in told if each is not None] == [0, 2]


def test_only_decode_engines_drop_kv_and_all_have_its_pages() -> None:
    prefill: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    section = TechniquesSection(
        compression=CompressionSection(mode="auto", keep_ratio=0.5, calibration="/gate")
    )
    add_sparse_attention(section, [prefill, decode], [decode])
    for engine in (prefill, decode):
        assert settings_of(engine["additional_config"]) == SparseSettings("off")
        assert engine["worker_cls"] == EXTENSIBLE_WORKER
    told = [bounded_settings_of(engine["additional_config"]) for engine in (prefill, decode)]
    assert told == [None, CompressionSettings("auto", 0.5, "/gate")]


@pytest.mark.parametrize("speculates", [True, False])
@pytest.mark.parametrize("reuses", [True, False])
def test_each_mix_with_drafting_and_blending_has_the_worker(speculates: bool, reuses: bool) -> None:
    engine = storing_engine(**({"worker_cls": SPECULATING} if speculates else {}))
    add_blending(BlendingSection(mode="request" if reuses else "off"), [engine])
    add_sparse_attention(ON, [engine])
    assert engine["worker_cls"] == EXTENSIBLE_WORKER


def test_a_worker_of_the_engines_own_is_refused_by_name() -> None:
    bounding = TechniquesSection(compression=CompressionSection(mode="auto"))
    for section, field in ((ON, "sparse"), (bounding, "compression")):
        with pytest.raises(ValueError, match=rf"techniques\.{field}.* worker_cls mine\.Worker"):
            add_sparse_attention(section, [{"worker_cls": "mine.Worker"}])


@pytest.mark.parametrize(
    ("others", "right"),
    [
        ({"store": {"engine": {"codec": "int4"}}}, "set store.engine.codec: raw"),
        (
            {"techniques": {"blending": {"mode": "auto"}, "sparse": {"page_tokens": 16}}},
            "set it to 32",
        ),
        (
            {"techniques": {"blending": {"mode": "auto"}, "sparse": {"offload_gib": 1}}},
            "set it to 0",
        ),
    ],
)
def test_what_cannot_go_with_it_is_refused(others: dict[str, Any], right: str) -> None:
    techniques = others.get("techniques", {})
    for mode in ("request", "off"):
        sparse = {**techniques.get("sparse", {}), "mode": mode}
        section = {**others, "techniques": {**techniques, "sparse": sparse}}
        if mode == "off":
            AppSection.model_validate(section)
        else:
            with pytest.raises(ValidationError, match=right):
                AppSection.model_validate(section)


def test_stored_blocks_of_other_kernel_blocks_are_other_blocks() -> None:
    config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(dtype="bfloat16", get_head_size=lambda: 64),
        cache_config=SimpleNamespace(block_size=128, cache_dtype="auto"),
        additional_config={},
    )
    plain = device_identity(config)
    found = {plain}
    for page in (16, 32):
        config.additional_config = SparseSettings(page_tokens=page).additional_config()
        found.add(device_identity(config))
    assert len(found) == 3 and "/" not in plain.removeprefix("cpu/")


# ---- requests -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "mode", "share"),
    [
        (None, "auto", 0.1),
        (None, "request", None),
        ({"sparse": "auto"}, "request", 0.1),
        ({"sparse": 0.3}, "request", 0.3),
        ({"sparse": 1}, "auto", 1.0),
        ({"sparse": "off"}, "auto", None),
        ({"sparse": 0.3}, "off", None),
        ({"sparse": 0.3, "techniques": "off"}, "auto", None),
    ],
)
@pytest.mark.parametrize("name", [SPARSE, COMPRESSION])
def test_request_and_app_agree(
    name: str, extra: dict[str, Any] | None, mode: str, share: float | None
) -> None:
    extra = extra and {name if key == SPARSE else key: value for key, value in extra.items()}
    apart = lossy_mode_of(extra, {name: (mode, 0.1)})
    assert apart == (None if share is None else LossyMode(name, share))


def test_no_request_is_both_sparse_and_bounded() -> None:
    both = {SPARSE: ("auto", 0.1), COMPRESSION: ("auto", 0.25)}
    assert lossy_mode_of(None, both) == LossyMode(SPARSE, 0.1)
    assert lossy_mode_of({COMPRESSION: "auto"}, both) == LossyMode(COMPRESSION, 0.25)
    assert lossy_mode_of({SPARSE: "off"}, both) == LossyMode(COMPRESSION, 0.25)
    with pytest.raises(TechniqueError, match="exclude each other"):
        lossy_mode_of({SPARSE: 0.1, COMPRESSION: 0.3}, both)
    with pytest.raises(TechniqueError, match="exclude each other"):
        requested_techniques({"vllm_xargs": {SPARSE: 0.1, COMPRESSION: "auto"}})


@pytest.mark.parametrize("value", [0, -1, 1.01, float("nan"), True, "some", [0.1], {}])
@pytest.mark.parametrize("name", [SPARSE, COMPRESSION])
def test_what_is_no_share_is_refused(name: str, value: object) -> None:
    with pytest.raises(TechniqueError) as error:
        lossy_mode_of({name: value}, {})
    assert error.value.param == f"vllm_xargs.{name}"
    with pytest.raises(TechniqueError):
        requested_techniques({"vllm_xargs": {name: value}})


@given(
    st.text().filter(lambda salt: not is_isolated(salt)),
    st.floats(0.001, 1),
    st.sampled_from([SPARSE, COMPRESSION]),
)
def test_a_prompt_is_shared_whatever_its_answer_attends_to(
    salt: str, share: float, name: str
) -> None:
    assert (
        salt_with_technique(salt, {name: share}, "store=int4")
        == salt_with_technique(salt, {}, "")
        == salt
    )


def test_a_clients_salt_must_not_look_marked() -> None:
    prompt = {"prompt_token_ids": [1], "cache_salt": "tenant:ann:own"}
    assert with_technique(prompt, SamplingParams(extra_args={"sparse": 0.1}), "") is prompt
    with pytest.raises(VLLMValidationError, match="cache_salt"):
        with_technique({"cache_salt": "technique:exact:"}, SamplingParams(), "")


@pytest.mark.parametrize("extra", [None, {}, {"slo": 1}, {"sparse": "auto"}, {"compression": 0.7}])
def test_the_engine_is_told_the_share_that_was_decided_and_no_other(extra: Any) -> None:
    params = SamplingParams(extra_args=extra)
    sparse, bounded = (
        with_keep_ratio(params, LossyMode(name, 0.3)) for name in (SPARSE, COMPRESSION)
    )
    assert keep_ratio_in(sparse, SPARSE) == 0.3 and keep_ratio_in(sparse, COMPRESSION) is None
    assert keep_ratio_in(bounded, SPARSE) is None and keep_ratio_in(bounded, COMPRESSION) == 0.3
    assert keep_ratio_in(with_keep_ratio(params, None), SPARSE) is None
    assert params.extra_args == extra
    assert (sparse.extra_args or {}).get("slo") == (extra or {}).get("slo")


def test_an_answer_tells_of_it_where_it_could_be() -> None:
    said = ({"vllm_xargs": {"sparse": sparse}} for sparse in ("auto", "off", 0.2, None))
    asks, refuses, shares, silent = (requested_techniques(request) for request in said)
    assert [each.sparse for each in (asks, refuses, shares, silent)] == [True, False, True, None]
    offer = offered_techniques("store=int4", {"blending": "auto", "sparse": "request"})
    assert offer == "store=int4, blending=auto, sparse=request"
    assert applied_techniques(asks, offer) == "store=int4, sparse", (
        "its prompt comes from the store, too"
    )
    assert applied_techniques(silent, offer) == "store=int4, blending"
    assert (
        applied_techniques(silent, offered_techniques("", {"blending": "off", "sparse": "auto"}))
        == "sparse"
    )
    assert (
        applied_techniques(refuses, offered_techniques("", {"blending": "off", "sparse": "auto"}))
        == "exact"
    )
    both = offered_techniques("", {"sparse": "auto", "compression": "auto"})
    told = [
        applied_techniques(each, both)
        for each in (silent, refuses, RequestedTechniques(compression=True))
    ]
    assert told == ["sparse", "compression", "compression"]
    assert applied_techniques(RequestedTechniques(exact=True, sparse=True), offer) == "exact"
