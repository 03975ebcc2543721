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
from headrace.config.techniques import ReuseSection, SparseSection
from headrace.reuse import add_reuse
from headrace.sparse import add_sparse
from headrace_decode._vllm_request import with_sparse, with_technique
from headrace_decode.replay.llm import OUR_WORKERS
from headrace_decode.sparse.engine.rows import share_of
from headrace_decode.sparse.engine.settings import SparseSettings, settings_of
from headrace_decode.speculation.settings import engine_arguments
from headrace_decode.techniques import (
    Asked,
    TechniqueError,
    applied,
    asked_of,
    offered,
    salt_for,
    sparse_share,
)
from headrace_kvstore.connector.identity import device_identity
from headrace_kvstore.salts import is_marked, tenant_of
from tests.unit.test_reuse_app import engine as storing_engine

ON = SparseSection(mode="request")
SPECULATING = engine_arguments(4)["worker_cls"]


# ---- configuration --------------------------------------------------------------------------


def test_it_is_off_and_changes_nothing_by_default() -> None:
    engine: dict[str, Any] = {"worker_cls": "mine.Worker"}
    add_sparse(AppSection().techniques.sparse, [engine])
    assert engine == {"worker_cls": "mine.Worker"}


def test_both_roles_get_the_worker_and_are_told() -> None:
    engines: list[dict[str, Any]] = [{}, {"additional_config": {"other": 1}}]
    add_sparse(SparseSection(mode="auto", share=0.2, unit_tokens=16), engines)
    for engine in engines:
        assert settings_of(engine["additional_config"]) == SparseSettings("auto", 0.2, 16)
        assert engine["worker_cls"].endswith("engine.worker.SparseTakingUpWorker")
    assert engines[1]["additional_config"]["other"] == 1


def test_only_decode_engines_let_kv_leave_the_cache() -> None:
    prefill: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    add_sparse(SparseSection(mode="auto", offload_gib=2), [prefill, decode], [decode])
    told = [settings_of(engine["additional_config"]) for engine in (prefill, decode)]
    assert [each.offload_gib for each in told if each is not None] == [0, 2]


@pytest.mark.parametrize("speculates", [True, False])
@pytest.mark.parametrize("reuses", [True, False])
def test_each_mix_with_drafting_and_reuse_has_a_worker(speculates: bool, reuses: bool) -> None:
    engine = storing_engine(**({"worker_cls": SPECULATING} if speculates else {}))
    add_reuse(ReuseSection(mode="request" if reuses else "off"), [engine])
    add_sparse(ON, [engine])
    name = "Speculating" if speculates else "TakingUp"
    assert engine["worker_cls"].endswith(f".Sparse{'Reusing' if reuses else ''}{name}Worker")
    assert engine["worker_cls"] in OUR_WORKERS


def test_a_worker_of_the_engines_own_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"worker_cls mine\.Worker"):
        add_sparse(ON, [{"worker_cls": "mine.Worker"}])


@pytest.mark.parametrize(
    ("others", "right"),
    [
        ({"store": {"engine": {"codec": "int4"}}}, "set store.engine.codec: raw"),
        (
            {"techniques": {"reuse": {"mode": "auto"}, "sparse": {"unit_tokens": 16}}},
            "set it to 32",
        ),
        (
            {"techniques": {"reuse": {"mode": "auto"}, "sparse": {"offload_gib": 1}}},
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
    for unit in (16, 32):
        config.additional_config = SparseSettings(unit_tokens=unit).additional_config()
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
def test_request_and_app_agree(extra: dict[str, Any] | None, mode: str, share: float) -> None:
    assert sparse_share(extra, mode, 0.1) == share


@pytest.mark.parametrize("value", [0, -1, 1.01, float("nan"), True, "some", [0.1], {}])
def test_what_is_no_share_is_refused(value: object) -> None:
    with pytest.raises(TechniqueError) as error:
        sparse_share({"sparse": value}, "off", 0.1)
    assert error.value.param == "vllm_xargs.sparse"
    with pytest.raises(TechniqueError):
        asked_of({"vllm_xargs": {"sparse": value}})


@given(st.text().filter(lambda salt: not is_marked(salt)), st.floats(0.001, 1))
def test_sparse_kv_is_shared_with_sparse_requests_of_its_share_alone(
    salt: str, share: float
) -> None:
    mine = salt_for(salt, None, "store=int4", share)
    assert is_marked(mine) and tenant_of(mine) == tenant_of(salt)
    assert mine == salt_for(salt, {"sparse": share}, "", share)
    others = [salt_for(salt, None, ""), salt_for(salt, {"techniques": "off"}, "store=int4")]
    assert mine not in [*others, salt_for(salt, None, "", share / 2)]


def test_the_mark_stands_before_the_tenant() -> None:
    params = SamplingParams()
    prompt = {"prompt_token_ids": [1], "cache_salt": "tenant:ann:own"}
    assert with_technique(prompt, params, "", 0.1)["cache_salt"] == (
        "technique:sparse-0.1:tenant:ann:own"
    )
    with pytest.raises(VLLMValidationError, match="cache_salt"):
        with_technique({"cache_salt": "technique:sparse-0.1:"}, params, "", 0.1)


@pytest.mark.parametrize("extra", [None, {}, {"slo": 1}, {"sparse": "auto"}, {"sparse": 0.7}])
def test_the_engine_is_told_the_share_that_was_decided_and_no_other(extra: Any) -> None:
    params = SamplingParams(extra_args=extra)
    assert share_of(with_sparse(params, 0.3).extra_args) == 0.3
    assert share_of(with_sparse(params, None).extra_args) is None
    assert params.extra_args == extra
    assert (with_sparse(params, 0.3).extra_args or {}).get("slo") == (extra or {}).get("slo")


def test_an_answer_tells_of_it_where_it_could_be() -> None:
    said = ({"vllm_xargs": {"sparse": sparse}} for sparse in ("auto", "off", 0.2, None))
    asks, refuses, shares, silent = (asked_of(request) for request in said)
    assert [each.sparse for each in (asks, refuses, shares, silent)] == [True, False, True, None]
    offer = offered("store=int4", "auto", "request")
    assert offer == "store=int4, reuse=auto, sparse=request"
    assert applied(asks, offer) == "sparse", "its KV meets neither the store nor reuse"
    assert applied(silent, offer) == "store=int4, reuse"
    assert applied(silent, offered("", "off", "auto")) == "sparse"
    assert applied(refuses, offered("", "off", "auto")) == "exact"
    assert applied(Asked(exact=True, sparse=True), offer) == "exact"
