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
    BoundedSection,
    ReuseSection,
    SparseSection,
    TechniquesSection,
)
from headrace.reuse import add_reuse
from headrace.sparse import add_sparse
from headrace_decode._vllm_request import with_share, with_technique
from headrace_decode.compression.engine.settings import BoundedSettings
from headrace_decode.compression.engine.settings import settings_of as bounded_settings_of
from headrace_decode.resume.llm import OUR_WORKERS
from headrace_decode.sparse.engine.settings import SparseSettings, settings_of
from headrace_decode.speculative.settings import engine_arguments
from headrace_decode.techniques import (
    BOUNDED,
    SPARSE,
    Apart,
    Asked,
    TechniqueError,
    apart_of,
    applied,
    asked_of,
    offered,
    salt_for,
    share_in,
)
from headrace_engine.connector.identity.engine_identity import device_identity
from headrace_kvstore.salts import is_marked
from tests.unit.test_reuse_app import engine as storing_engine


def sparse(**fields: Any) -> TechniquesSection:
    return TechniquesSection(sparse=SparseSection(**fields))


ON = sparse(mode="request")
SPECULATING = engine_arguments(4)["worker_cls"]


# ---- configuration --------------------------------------------------------------------------


def test_it_is_off_and_changes_nothing_by_default() -> None:
    engine: dict[str, Any] = {"worker_cls": "mine.Worker"}
    add_sparse(AppSection().techniques, [engine])
    assert engine == {"worker_cls": "mine.Worker"}


def test_both_roles_get_the_worker_and_are_told() -> None:
    engines: list[dict[str, Any]] = [{}, {"additional_config": {"other": 1}}]
    add_sparse(sparse(mode="auto", share=0.2, unit_tokens=16), engines)
    for engine in engines:
        assert settings_of(engine["additional_config"]) == SparseSettings("auto", 0.2, 16)
        assert engine["worker_cls"].endswith("engine.worker.SparseTakingUpWorker")
    assert engines[1]["additional_config"]["other"] == 1


def test_only_decode_engines_let_kv_leave_the_cache() -> None:
    prefill: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    add_sparse(sparse(mode="auto", offload_gib=2), [prefill, decode], [decode])
    told = [settings_of(engine["additional_config"]) for engine in (prefill, decode)]
    assert [each.offload_gib for each in told if each is not None] == [0, 2]


def test_only_decode_engines_drop_kv_and_all_have_its_units() -> None:
    prefill: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    section = TechniquesSection(bounded=BoundedSection(mode="auto", share=0.5, calibration="/gate"))
    add_sparse(section, [prefill, decode], [decode])
    for engine in (prefill, decode):
        assert settings_of(engine["additional_config"]) == SparseSettings("off")
        assert engine["worker_cls"].endswith("engine.worker.SparseTakingUpWorker")
    told = [bounded_settings_of(engine["additional_config"]) for engine in (prefill, decode)]
    assert told == [None, BoundedSettings("auto", 0.5, "/gate")]


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
    bounding = TechniquesSection(bounded=BoundedSection(mode="auto"))
    for section, field in ((ON, "sparse"), (bounding, "bounded")):
        with pytest.raises(ValueError, match=rf"techniques\.{field}.* worker_cls mine\.Worker"):
            add_sparse(section, [{"worker_cls": "mine.Worker"}])


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
@pytest.mark.parametrize("name", [SPARSE, BOUNDED])
def test_request_and_app_agree(
    name: str, extra: dict[str, Any] | None, mode: str, share: float | None
) -> None:
    extra = extra and {name if key == SPARSE else key: value for key, value in extra.items()}
    apart = apart_of(extra, {name: (mode, 0.1)})
    assert apart == (None if share is None else Apart(name, share))


def test_no_request_is_both_sparse_and_bounded() -> None:
    both = {SPARSE: ("auto", 0.1), BOUNDED: ("auto", 0.25)}
    assert apart_of(None, both) == Apart(SPARSE, 0.1)
    assert apart_of({BOUNDED: "auto"}, both) == Apart(BOUNDED, 0.25)
    assert apart_of({SPARSE: "off"}, both) == Apart(BOUNDED, 0.25)
    with pytest.raises(TechniqueError, match="exclude each other"):
        apart_of({SPARSE: 0.1, BOUNDED: 0.3}, both)
    with pytest.raises(TechniqueError, match="exclude each other"):
        asked_of({"vllm_xargs": {SPARSE: 0.1, BOUNDED: "auto"}})


@pytest.mark.parametrize("value", [0, -1, 1.01, float("nan"), True, "some", [0.1], {}])
@pytest.mark.parametrize("name", [SPARSE, BOUNDED])
def test_what_is_no_share_is_refused(name: str, value: object) -> None:
    with pytest.raises(TechniqueError) as error:
        apart_of({name: value}, {})
    assert error.value.param == f"vllm_xargs.{name}"
    with pytest.raises(TechniqueError):
        asked_of({"vllm_xargs": {name: value}})


@given(
    st.text().filter(lambda salt: not is_marked(salt)),
    st.floats(0.001, 1),
    st.sampled_from([SPARSE, BOUNDED]),
)
def test_a_prompt_is_shared_whatever_its_answer_attends_to(
    salt: str, share: float, name: str
) -> None:
    assert salt_for(salt, {name: share}, "store=int4") == salt_for(salt, {}, "") == salt


def test_a_clients_salt_must_not_look_marked() -> None:
    prompt = {"prompt_token_ids": [1], "cache_salt": "tenant:ann:own"}
    assert with_technique(prompt, SamplingParams(extra_args={"sparse": 0.1}), "") is prompt
    with pytest.raises(VLLMValidationError, match="cache_salt"):
        with_technique({"cache_salt": "technique:exact:"}, SamplingParams(), "")


@pytest.mark.parametrize("extra", [None, {}, {"slo": 1}, {"sparse": "auto"}, {"bounded": 0.7}])
def test_the_engine_is_told_the_share_that_was_decided_and_no_other(extra: Any) -> None:
    params = SamplingParams(extra_args=extra)
    sparse, bounded = (with_share(params, Apart(name, 0.3)) for name in (SPARSE, BOUNDED))
    assert share_in(sparse, SPARSE) == 0.3 and share_in(sparse, BOUNDED) is None
    assert share_in(bounded, SPARSE) is None and share_in(bounded, BOUNDED) == 0.3
    assert share_in(with_share(params, None), SPARSE) is None
    assert params.extra_args == extra
    assert (sparse.extra_args or {}).get("slo") == (extra or {}).get("slo")


def test_an_answer_tells_of_it_where_it_could_be() -> None:
    said = ({"vllm_xargs": {"sparse": sparse}} for sparse in ("auto", "off", 0.2, None))
    asks, refuses, shares, silent = (asked_of(request) for request in said)
    assert [each.sparse for each in (asks, refuses, shares, silent)] == [True, False, True, None]
    offer = offered("store=int4", {"reuse": "auto", "sparse": "request"})
    assert offer == "store=int4, reuse=auto, sparse=request"
    assert applied(asks, offer) == "store=int4, sparse", "its prompt comes from the store, too"
    assert applied(silent, offer) == "store=int4, reuse"
    assert applied(silent, offered("", {"reuse": "off", "sparse": "auto"})) == "sparse"
    assert applied(refuses, offered("", {"reuse": "off", "sparse": "auto"})) == "exact"
    both = offered("", {"sparse": "auto", "bounded": "auto"})
    told = [applied(each, both) for each in (silent, refuses, Asked(bounded=True))]
    assert told == ["sparse", "bounded", "bounded"]
    assert applied(Asked(exact=True, sparse=True), offer) == "exact"
