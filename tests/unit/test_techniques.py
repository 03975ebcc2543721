"""Exact requests beside lossy ones: at each seam, nothing approximate is attended to by them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from headrace.observability.gateway_metrics import GatewayMetrics
from headrace_decode.composition import APART, FEATURES, composition_table
from headrace_decode.llm.request_params import lossy_store_of, with_technique, with_tenant
from headrace_decode.techniques import (
    RequestedTechniques,
    TechniqueError,
    applied_techniques,
    is_exact_requested,
    requires_exact,
    salt_with_technique,
)
from headrace_engine.connector.identity.engine_identity import lossy_codec
from headrace_kvstore.identity.prompt_hash import hash_prompt, root_hash
from headrace_kvstore.identity.salts import (
    EXACT,
    is_isolated,
    isolated_salt,
    tenant_of,
    tenant_salt,
)
from tests.support.kvscheduling import B, Engine, Store, Tiers, hashes, request
from tests.unit.gateway_fakes import (
    CHAT,
    PROMPT,
    FakeCluster,
    FakeReplica,
    answer,
    gateway_over,
    stream,
)

OFF = {"techniques": "off"}
INT4 = "store=int4"
salts = st.text().filter(lambda salt: not is_isolated(salt))


# ---- what a request may say -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "exact"),
    [(None, False), ({}, False), ({"techniques": "auto"}, False), (OFF, True), ({"slo": 1}, False)],
)
def test_exact_only_is_asked_for_by_one_word(extra: Any, exact: bool) -> None:
    assert is_exact_requested(extra) is exact


@pytest.mark.parametrize("value", ["on", "", "OFF", 0, False, None, ["off"]])
def test_any_other_word_is_an_error(value: Any) -> None:
    with pytest.raises(TechniqueError) as error:
        is_exact_requested({"techniques": value})
    assert error.value.param == "vllm_xargs.techniques"


def test_a_beam_search_cannot_be_exact_only_since_vllm_loses_the_word() -> None:
    assert not requires_exact({"use_beam_search": True})
    with pytest.raises(TechniqueError, match="beam search"):
        requires_exact({"use_beam_search": True, "vllm_xargs": OFF})


def test_an_answer_tells_what_could_touch_its_kv() -> None:
    exact = RequestedTechniques(exact=True)
    told = [
        applied_techniques(RequestedTechniques(), ""),
        applied_techniques(exact, ""),
        applied_techniques(exact, INT4),
    ]
    assert told == ["exact"] * 3
    assert applied_techniques(RequestedTechniques(), INT4) == INT4


# ---- salts ----------------------------------------------------------------------------------


@given(salts)
def test_salts_are_as_ever_where_no_technique_matters(salt: str) -> None:
    assert salt_with_technique(salt, None, INT4) == salt_with_technique(salt, OFF, "") == salt


@given(salts, salts)
def test_a_marked_salt_equals_no_other(one: str, other: str) -> None:
    assert isolated_salt(one, EXACT) != other
    assert (isolated_salt(one, EXACT) == isolated_salt(other, EXACT)) == (one == other)


@given(st.text(st.characters(exclude_characters=":"), min_size=1), st.text())
def test_a_marked_salt_tells_its_tenant(tenant: str, own: str) -> None:
    assert tenant_of(isolated_salt(tenant_salt(tenant, own), EXACT)) == tenant


def test_a_mark_is_given_once_and_cannot_be_mistaken() -> None:
    for wrong in ("", "a:b"):
        with pytest.raises(ValueError, match="no mark"):
            isolated_salt("s", wrong)
    with pytest.raises(ValueError, match="already"):
        isolated_salt(isolated_salt("s", EXACT), EXACT)


@pytest.mark.parametrize("lossy", ["", INT4])
def test_no_client_may_send_a_salt_that_looks_marked(lossy: str) -> None:
    with pytest.raises(TechniqueError) as error:
        salt_with_technique("technique:exact:", None, lossy)
    assert error.value.param == "cache_salt"


def test_exact_and_lossy_requests_share_no_block_hash() -> None:
    tokens, root = list(range(64)), root_hash("0")
    plain = hash_prompt(tokens, B, root, salt_with_technique("s", None, INT4))
    exact = hash_prompt(tokens, B, root, salt_with_technique("s", OFF, INT4))
    assert plain == hash_prompt(tokens, B, root, "s")
    assert not set(plain) & set(exact)


# ---- decode ---------------------------------------------------------------------------------


def transfer(codec: str | None) -> SimpleNamespace:
    """A KVTransferConfig as `headrace.deploy.store` makes it."""
    stored = {} if codec is None else {"codec": codec}
    children = [
        {"kv_connector": "NixlConnector"},
        {"kv_connector": "HeadraceConnector", "kv_connector_extra_config": stored},
    ]
    return SimpleNamespace(kv_connector_extra_config={"connectors": children})


def test_the_engines_connectors_tell_whether_the_store_is_lossy() -> None:
    assert [lossy_codec(transfer(c)) for c in (None, "raw", "int4")] == ["", "", "int4"]
    alone = SimpleNamespace(kv_connector_extra_config={"codec": "fp8"})
    assert lossy_codec(alone) == "fp8" and lossy_codec(None) == ""
    config: Any = SimpleNamespace(kv_transfer_config=transfer("int4"))
    assert lossy_store_of(config) == INT4


def test_the_mark_stands_before_the_tenant_so_no_tenant_can_forge_it() -> None:
    prompt = with_tenant({"prompt_token_ids": [1], "cache_salt": "technique:exact:"}, "ann")
    params = SamplingParams(extra_args=dict(OFF))
    assert with_technique(prompt, SamplingParams(), INT4) is prompt
    assert with_technique(prompt, params, "") is prompt
    salted = with_technique(prompt, params, INT4)["cache_salt"]
    assert salted == "technique:exact:tenant:ann:technique:exact:"


def test_a_salt_names_its_tenant_where_there_are_tenants() -> None:
    prompt = {"prompt_token_ids": [1], "cache_salt": "sql"}
    assert with_tenant(prompt, None) is prompt
    assert with_tenant(prompt, "ann")["cache_salt"] == "tenant:ann:sql"


def test_the_decode_replica_refuses_what_the_gateway_did_not_see() -> None:
    with pytest.raises(VLLMValidationError, match='"auto" or "off"'):
        with_technique({}, SamplingParams(extra_args={"techniques": "some"}), INT4)
    with pytest.raises(VLLMValidationError, match="cache_salt"):
        with_technique({"cache_salt": "technique:x:"}, SamplingParams(), "")
    with pytest.raises(TypeError, match="cannot carry"):
        with_technique("text", SamplingParams(extra_args=dict(OFF)), INT4)


# ---- store ----------------------------------------------------------------------------------


def test_the_store_neither_supplies_nor_keeps_blocks_under_a_mark() -> None:
    told: list[Any] = []
    salt, tiers = isolated_salt("s", EXACT), Tiers(*hashes(4))
    for cache_salt, loaded in (("s", 3 * B), (salt, 0)):
        engine = Engine(
            Store(set(hashes(4))), request(4 * B, cache_salt=cache_salt), record_prompt=told.append
        )
        assert engine.scheduler.matched(engine.request, 0) == loaded
    assert told == [hashes(4)], "the policy learns of the first request only"
    asks = Engine(Store(), request(4 * B, cache_salt=salt), slow=tiers, record_prompt=told.append)
    asks.scheduler.added(asks.request)
    assert asks.scheduler.matched(asks.request, 0) == 0
    asks.scheduler.finished(asks.request, [[1, 2, 3, 4]])
    assert (tiers.asked, told[1:], asks.pool.held) == ([], [], [])


# ---- gateway --------------------------------------------------------------------------------


class Techniques(GatewayMetrics):
    """Remembers what it is told of techniques."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def techniques(self, applied_techniques: str) -> None:
        self.told.append(applied_techniques)


@pytest.mark.parametrize("handler", [answer, stream])
async def test_an_answers_header_tells_the_techniques(handler: Any) -> None:
    async with gateway_over(handler) as bench:
        body = {**PROMPT, "vllm_xargs": OFF}
        async with bench.client.post(CHAT, json=body) as response:
            assert response.headers["x-headrace-techniques"] == "exact"
        async with bench.client.get("/v1/models") as response:
            assert "x-headrace-techniques" not in response.headers


async def test_a_wrong_word_is_answered_400_and_reaches_no_replica() -> None:
    async with gateway_over(answer) as bench:
        body = {**PROMPT, "vllm_xargs": {"techniques": "some"}}
        async with bench.client.post(CHAT, json=body) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert (error["code"], error["param"]) == ("invalid_technique", "vllm_xargs.techniques")
        assert not bench.replica.seen


async def test_a_lossy_replica_is_told_of_unless_the_request_was_exact_only() -> None:
    replica = await FakeReplica(answer, techniques=INT4).start()
    metrics = Techniques()
    async with gateway_over(backend=FakeCluster([replica]), metrics=metrics) as bench:
        for extra, told in (({}, INT4), (OFF, "exact")):
            async with bench.client.post(CHAT, json={**PROMPT, "vllm_xargs": extra}) as response:
                assert response.headers["x-headrace-techniques"] == told
    await replica.stop()
    assert metrics.told == [INT4, "exact"]


def test_the_docs_say_which_features_a_request_cannot_combine() -> None:
    docs = Path(__file__).parents[2] / "docs" / "techniques.md"
    assert composition_table() in docs.read_text()
    assert all(len(pair) == 2 and pair <= {*FEATURES} for pair in APART)
