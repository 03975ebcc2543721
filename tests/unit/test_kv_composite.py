"""The composite connector: which child's offer is taken."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from headrace_engine.connector.composite import HeadracePDConnector
from headrace_engine.connector.connector import HeadraceConnector
from headrace_engine.connector.stats import StoreStats
from headrace_engine.pull_proof.stats import TransferStats
from headrace_engine.vllm.connectors import KVConnectorFactory
from headrace_engine.vllm.engine import connector_stats
from headrace_prefill.blending.engine.stored_connector import StoredBlendingConnector
from tests.support.connectors import (
    beside,
    checked_nixl_connector,
    connector_of,
    store_connector,
)


class Child:
    def __init__(
        self, offer: tuple[int | None, bool], busy: bool = False, may_wait: bool = False
    ) -> None:
        self.offer, self.busy, self.may_wait = offer, busy, may_wait
        self.asked = 0

    def get_num_new_matched_tokens(self, request: object, n: int) -> tuple[int | None, bool]:
        self.asked += 1
        return self.offer

    def has_pending_push_work(self) -> bool:
        return self.busy


def composite(*children: Child) -> HeadracePDConnector:
    made = object.__new__(HeadracePDConnector)
    made._connectors = list(children)
    made._requests_to_connector = {}
    return made


REQUEST = SimpleNamespace(request_id="r", num_prompt_tokens=8000)


@pytest.mark.parametrize(
    ("offers", "taken", "by"),
    [
        ([(0, False), (0, False)], (0, False), None),
        ([(6000, True), (5888, False)], (6000, True), 0),
        ([(128, True), (5888, False)], (5888, False), 1),
        ([(256, True), (256, False)], (256, True), 0),
        ([(0, False), (128, False)], (128, False), 1),
    ],
)
def test_the_largest_offer_is_taken(
    offers: list[tuple[int, bool]], taken: tuple[int, bool], by: int | None
) -> None:
    made = composite(*map(Child, offers))
    assert made.get_num_new_matched_tokens(REQUEST, 0) == taken
    assert made._requests_to_connector.get("r") == by


def test_a_child_that_needs_time_is_waited_for() -> None:
    made = composite(Child((128, False)), Child((None, False)))
    assert made.get_num_new_matched_tokens(REQUEST, 0) == (None, False)


@pytest.mark.parametrize("store_first", [False, True])
@pytest.mark.parametrize(("computed", "offer"), [(0, 8000), (0, 7999), (2048, 5952)])
def test_who_offers_the_whole_prompt_is_taken_at_once_and_the_store_is_not_asked(
    store_first: bool, computed: int, offer: int
) -> None:
    nixl, store = Child((offer, True)), Child((None, False), may_wait=True)
    made = composite(*([store, nixl] if store_first else [nixl, store]))
    assert made.get_num_new_matched_tokens(REQUEST, computed) == (offer, True)
    assert made._requests_to_connector["r"] == int(store_first)
    assert not store.asked


def test_our_connectors_take_several_cache_groups() -> None:
    """Else vLLM ends the engine, whatever its model."""
    module = "headrace_prefill.blending.engine.stored_connector"
    blending = connector_of("StoredBlendingConnector", module, {})
    made = beside(checked_nixl_connector(), store_connector({}), blending)
    config = KVTransferConfig(**made)
    assert KVConnectorFactory.supports_hma_config(config)
    assert HeadracePDConnector.all_children_support_hma(config)


def test_the_store_may_wait() -> None:
    assert HeadraceConnector.may_wait


def test_less_than_the_whole_prompt_waits_for_the_store() -> None:
    made = composite(Child((7000, True)), Child((None, False), may_wait=True))
    assert made.get_num_new_matched_tokens(REQUEST, 0) == (None, False)


def test_of_equal_offers_the_earlier_childs_is_taken_whoever_is_asked_first() -> None:
    made = composite(Child((256, False), may_wait=True), Child((256, True)))
    assert made.get_num_new_matched_tokens(REQUEST, 0) == (256, False)


def test_asked_again_the_last_answer_counts() -> None:
    store = Child((128, False))
    made = composite(Child((0, False)), store)
    made.get_num_new_matched_tokens(REQUEST, 0)
    store.offer = (0, False)
    assert made.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    assert made._requests_to_connector == {}


def test_the_engine_steps_on_while_any_child_is_busy() -> None:
    assert composite(Child((0, False)), Child((0, False), busy=True)).has_pending_push_work()
    assert not composite(Child((0, False))).has_pending_push_work()


def test_the_statistics_of_all_are_read_from_what_an_engine_sends() -> None:
    sent = {
        "HeadraceConnector": StoreStats().data,
        "NixlConnector": TransferStats().data,
        StoredBlendingConnector.__name__: {"recompute_s": 0.5},
    }
    read = HeadracePDConnector.build_kv_connector_stats(json.loads(json.dumps(sent)))
    assert read is not None and read.aggregate(read).reduce().keys() == sent.keys()


def test_an_engine_sends_the_statistics_of_each_as_a_mapping_by_its_name() -> None:
    """As `headrace_engine.vllm.engine.connector_stats` reads them."""
    store, nixl = StoreStats(), TransferStats()
    sent = MultiKVConnectorStats({"HeadraceConnector": store, "NixlConnector": nixl}).to_dict()
    assert connector_stats(sent) == [store.data, nixl.data]
    assert connector_stats(nixl.to_dict()) == [nixl.data]
    assert connector_stats({}) == []
