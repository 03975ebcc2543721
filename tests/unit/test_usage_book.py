"""Sums of usage in a replica: by tenant, and by client request."""

from __future__ import annotations

import asyncio

import pytest

from headrace_engine.usage import usage_book
from headrace_engine.usage.request_usage import (
    MAX_VALUE,
    RequestUsage,
    tenant_of_salt,
    usage_of_dict,
)
from headrace_engine.usage.scheduler_usage import UsageUpdate
from headrace_engine.usage.usage_book import MAX_TENANTS, OTHERS, UsageBook
from headrace_kvstore.identity.salts import isolated_salt, tenant_salt


def values(**quantities: float) -> list[float]:
    return RequestUsage(**quantities).values()  # type: ignore[arg-type]


def grown(tenant: str = "shop", step_s: float = 0.0, **quantities: float) -> UsageUpdate:
    """A tenant's sum has grown."""
    return UsageUpdate({tenant: values(**quantities)}, [], step_s)


def ended(name: str, tenant: str = "shop", **quantities: float) -> UsageUpdate:
    """A request has ended, and its tenant's sum has grown by all of it."""
    cost = values(**quantities)
    return UsageUpdate({tenant: cost}, [(name, tenant, cost)], 0.0)


@pytest.fixture
def book() -> UsageBook:
    """Of a replica whose engine reports."""
    made = UsageBook()
    made.add(UsageUpdate({}, [], 0.0))
    return made


def test_totals_are_sums_by_tenant(book: UsageBook) -> None:
    book.add(grown("shop", 1.0, computed_tokens=5))
    book.add(grown("bank", computed_tokens=7))
    book.add(grown("shop", 0.5, computed_tokens=1, engine_s=0.5))
    assert book.totals["shop"] == RequestUsage(computed_tokens=6, engine_s=0.5)
    assert book.totals["bank"] == RequestUsage(computed_tokens=7)
    assert book.step_s == 1.5


def test_tenants_beyond_the_limit_share_one_total(book: UsageBook) -> None:
    for number in range(MAX_TENANTS + 5):
        book.add(grown(f"t{number}", computed_tokens=1))
    assert len(book.totals) == MAX_TENANTS + 1
    assert book.totals[OTHERS].computed_tokens == 5


def test_a_clients_request_has_what_all_its_requests_to_the_engine_cost(book: UsageBook) -> None:
    record = book.record_of("shop", "r")
    book.follow("0_cmpl-r-aaaa", record)
    book.follow("1_cmpl-r-bbbb", record)
    book.add(ended("0_cmpl-r-aaaa", output_tokens=3))
    assert not record.is_complete
    book.add(ended("1_cmpl-r-bbbb", output_tokens=4))
    assert record.is_complete and record.usage.output_tokens == 7


def test_an_id_without_vllms_random_word_follows_too(book: UsageBook) -> None:
    record = book.record_of("shop", "r")
    for _ in range(2):  # a second one after the first was given up
        book.follow("cmpl-r-0", record)
    book.add(ended("cmpl-r-0-12345678", computed_tokens=3))
    book.add(ended("cmpl-r-0-87654321", computed_tokens=4))
    assert record.is_complete and record.usage.computed_tokens == 7


def test_what_other_engines_did_is_shown_and_not_summed(book: UsageBook) -> None:
    record = book.record_of("shop", "r")
    record.elsewhere.add(RequestUsage(computed_tokens=100))
    book.follow("e", record)
    book.add(ended("e", pulled_tokens=99, computed_tokens=1))
    assert record.whole() == RequestUsage(computed_tokens=101, pulled_tokens=99)
    assert book.totals["shop"].computed_tokens == 1


def test_a_tenant_does_not_find_anothers_request(book: UsageBook) -> None:
    book.record_of("shop", "r")
    assert book.find("r", "bank") == [] and len(book.find("r", "shop")) == 1
    book.record_of("bank", "r")
    assert [each.tenant for each in book.find("r", None)] == ["shop", "bank"]


def test_only_the_last_requests_are_kept(book: UsageBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_book, "MAX_RECORDS", 2)
    first = book.record_of("shop", "1")
    for number in range(1, 4):
        book.follow(f"e{number}", book.record_of("shop", str(number)))
    assert book.find("1", "shop") == [] and book.find("3", "shop")
    assert first.is_complete, "it is no longer followed"


def test_nothing_is_awaited_of_an_engine_that_does_not_report() -> None:
    book = UsageBook()
    record = book.record_of("", "r")
    book.follow("e", record)
    assert record.is_complete


async def test_a_record_is_awaited_until_its_last_row(book: UsageBook) -> None:
    record = book.record_of("shop", "r")
    book.follow("e", record)
    assert not await record.completed(0.001)
    asyncio.get_running_loop().call_soon(book.add, ended("e"))
    assert await record.completed(60.0)


async def test_several_may_wait_for_one_record(book: UsageBook) -> None:
    record = book.record_of("shop", "r")
    book.follow("e", record)
    asyncio.get_running_loop().call_soon(book.add, ended("e"))
    assert await asyncio.gather(*(record.completed(60.0) for _ in range(3))) == [True] * 3


def test_a_restart_begins_at_zero(book: UsageBook) -> None:
    book.add(grown(step_s=1.0, computed_tokens=5))
    book.count(computed_tokens=5)
    book.restart()
    assert book.report()["tenants"] == {} and book.snapshot()["vllm"] == {} and not book.step_s


def test_a_report_leaves_zeros_out(book: UsageBook) -> None:
    book.add(grown(step_s=1.0, computed_tokens=5))
    assert book.report()["tenants"] == {"shop": {"computed_tokens": 5}}


def test_a_header_has_the_quantities_that_are_not_zero() -> None:
    usage = RequestUsage(requests=1, prompt_tokens=9, engine_s=0.12345678)
    assert usage.header() == b"requests=1, prompt_tokens=9, engine_s=0.123457"


def test_a_usage_survives_its_dictionary() -> None:
    usage = RequestUsage(requests=1, cached_tokens=3, engine_s=0.25)
    assert usage_of_dict({**usage.to_dict(), "of_a_later_version": 1}) == usage


@pytest.mark.parametrize("value", [-1, MAX_VALUE * 2, float("nan"), "1", True, None])
def test_a_quantity_of_another_process_is_checked(value: object) -> None:
    with pytest.raises(ValueError, match="computed_tokens: must be a number from 0 to"):
        usage_of_dict({"computed_tokens": value})


def test_a_salt_names_the_tenant_also_under_a_mark() -> None:
    salt = tenant_salt("shop", "own")
    assert tenant_of_salt(salt) == tenant_of_salt(isolated_salt(salt, "blending-1")) == "shop"
    assert tenant_of_salt("") == tenant_of_salt("a client's own") == ""
