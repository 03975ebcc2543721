"""The composite connector: which child's offer is taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace_kvstore.connector.composite import HeadracePDConnector


class Child:
    def __init__(self, offer: tuple[int | None, bool], busy: bool = False) -> None:
        self.offer, self.busy = offer, busy

    def get_num_new_matched_tokens(self, request: object, n: int) -> tuple[int | None, bool]:
        return self.offer

    def has_pending_push_work(self) -> bool:
        return self.busy


def composite(*children: Child) -> HeadracePDConnector:
    made = object.__new__(HeadracePDConnector)
    made._connectors = list(children)
    made._requests_to_connector = {}
    return made


REQUEST = SimpleNamespace(request_id="r")


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
