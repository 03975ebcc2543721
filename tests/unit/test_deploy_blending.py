"""Reuse in an app's configuration and in its engines' arguments."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config import AppSection
from headrace.config.techniques import BlendingSection
from headrace.deploy.blending import add_blending
from headrace_decode.speculative.settings import engine_arguments
from headrace_engine.extensions.extension import EXTENSIBLE_WORKER

ON = BlendingSection(mode="request")
STORE = {"kv_connector": "HeadraceConnector", "kv_connector_extra_config": {"name": "store"}}


def engine(**more: Any) -> dict[str, Any]:
    connectors = [{"kv_connector": "NixlConnector"}, dict(STORE)]
    transfer = {
        "kv_connector": "HeadracePDConnector",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    return {"kv_transfer_config": transfer, **more}


def test_it_is_off_and_changes_nothing_by_default() -> None:
    one = engine()
    assert add_blending(AppSection().techniques.blending, [one]) is None
    assert one == engine()


def test_a_third_connector_has_the_stores_settings() -> None:
    one = engine()
    made = add_blending(ON, [one])
    assert made is not None and (made.mode, made.recompute_ratio) == ("request", 0.1)
    connectors = one["kv_transfer_config"]["kv_connector_extra_config"]["connectors"]
    assert [each["kv_connector"] for each in connectors] == [
        *("NixlConnector", "HeadraceConnector", "StoredBlendingConnector"),
    ]
    assert connectors[2]["kv_connector_extra_config"] == {"name": "store"}


def test_engines_that_draft_and_those_that_do_not_get_the_worker() -> None:
    drafting = engine(worker_cls=engine_arguments(4)["worker_cls"])
    plain = engine()
    add_blending(ON, [drafting, plain])
    assert drafting["worker_cls"] == plain["worker_cls"] == EXTENSIBLE_WORKER


def test_engines_of_several_ranks_reuse() -> None:
    assert add_blending(ON, [engine(tensor_parallel_size=2)]) is not None


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"worker_cls": "mine.Worker"}, "worker_cls mine.Worker"),
        ({"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, "connectors of its own"),
        ({"kv_transfer_config": None}, "connectors of its own"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"enable_lora": True}, "enable_lora"),
    ],
)
def test_an_engine_that_cannot_reuse_is_named(more: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        add_blending(ON, [engine(**more)])


@pytest.mark.parametrize(
    ("store", "right"),
    [
        ({"enabled": False}, "set store.enabled: true"),
        ({"engine": {"codec": "int4"}}, "set store.engine.codec: raw"),
    ],
)
def test_reuse_without_a_store_of_exact_kv_is_refused(store: dict[str, Any], right: str) -> None:
    with pytest.raises(ValidationError, match=right):
        AppSection.model_validate({"store": store, "techniques": {"blending": {"mode": "auto"}}})
    AppSection.model_validate({"store": store})
