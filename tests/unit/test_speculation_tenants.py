"""What tenants may have of each other, and what the operator decides for each."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.drafting.one_row import OneRowMemory as Memory
from headrace.config.speculation import SpeculationSection
from headrace.speculation import tenants_of
from headrace_decode.speculative.draft import Source
from headrace_decode.speculative.request import facts_of, request_arguments
from headrace_decode.speculative.retrieval.anonymity import WINDOW_TOKENS, SharedWindows
from headrace_decode.speculative.retrieval.draft_memory import PUBLIC_KEY, Settings, tenant_key
from headrace_decode.speculative.sharing.exchange import Exchange
from headrace_decode.tenants import TenantPolicy, Tenants

TEXT = np.arange(1000, 1400, dtype=np.int32)


def memory(k: int | None, replica: int = 0) -> Memory:
    for_all = frozenset({Source.RESPONSE} if k else ())
    settings = Settings(capacity_bytes=2 << 20, for_all=for_all, shared_k=k, replica=replica)
    return Memory(settings)


def answered(to: Memory, tenant: str, answer: NDArray[np.int32] = TEXT, keep: bool = True) -> None:
    handle = to.open_request("past", np.arange(3, dtype=np.int32), tenant)
    to.extend(handle, answer)
    to.close_request(handle, keep=keep)


def drafted(of: Memory, tenant: str) -> int:
    """How many tokens are drafted at all places of the text together."""
    count = 0
    for at in range(4, len(TEXT), 8):
        handle = of.open_request("now", TEXT[at - 4 : at], tenant)
        found = of.draft(handle, 8).tokens
        assert found.tolist() == TEXT[at : at + len(found)].tolist()
        count += len(found)
        of.close_request(handle, keep=False)
    return count


class TestSharing:
    def test_without_the_switch_nothing_is_shared_however_many_had_it(self) -> None:
        kept = memory(None)
        for tenant in "abcdef":
            answered(kept, tenant)
        assert drafted(kept, "new") == 0

    def test_what_k_tenants_were_answered_is_drafted_for_others(self) -> None:
        kept = memory(3)
        for tenant in "ab":
            answered(kept, tenant)
            answered(kept, tenant)
        assert drafted(kept, "new") == 0
        answered(kept, "c")
        assert drafted(kept, "new") > 100

    def test_answers_that_are_not_kept_do_not_count(self) -> None:
        kept = memory(2)
        answered(kept, "a")
        answered(kept, "b", keep=False)
        assert drafted(kept, "new") == 0

    def test_prompts_do_not_count(self) -> None:
        kept = memory(2)
        for tenant in "ab":
            handle = kept.open_request("past", TEXT, tenant)
            kept.extend(handle, [ord(tenant), 5, 6])
            kept.close_request(handle)
        assert kept.pool.find(PUBLIC_KEY) is None

    def test_other_replicas_have_it_once(self) -> None:
        a, b = memory(2, 1), memory(2, 2)
        log, other = Exchange(a), Exchange(b)
        for tenant in "ab":
            answered(a, tenant)
        for tenant in "cd":
            answered(b, tenant)
        held = b.stats()["segments"]
        told = dict(iter(lambda: log.tell(1 << 20), None))[PUBLIC_KEY]
        other.absorb(told, "from a")
        assert b.stats()["segments"] == held
        closed = memory(None, 3)
        Exchange(closed).absorb(told, "from a")
        assert closed.pool.find(PUBLIC_KEY) is None

    def test_a_window_that_was_published_is_not_again(self) -> None:
        shared = SharedWindows(2)
        answer = TEXT[:100]
        shared.observe("a", answer)
        assert len(shared.observe("b", answer)) > 5
        assert shared.observe("c", answer) == []

    def test_an_answer_shorter_than_a_window_has_none(self) -> None:
        shared = SharedWindows(2, one_in=1)
        for tenant in "ab":
            assert shared.observe(tenant, TEXT[: WINDOW_TOKENS - 1]) == []
        assert len(shared) == 0

    @pytest.mark.parametrize(("k", "window"), [(1, 15), (2, 1)])
    def test_one_tenant_is_no_crowd(self, k: int, window: int) -> None:
        with pytest.raises(ValueError, match="both must be >= 2"):
            SharedWindows(k, window_tokens=window)


class TestPolicy:
    def test_a_salt_has_its_own_policy_else_that_of_the_others(self) -> None:
        section = SpeculationSection.model_validate(
            {"tenants": {"*": {"keep": False}, "a": {"draft": False}, "": {}}}
        )
        tenants = tenants_of(section)
        assert tenants.of("a") == TenantPolicy(draft=False, keep=True)
        assert tenants.of("b") == TenantPolicy(draft=True, keep=False)
        assert tenants.of("") == TenantPolicy()
        assert Tenants().of("b") == TenantPolicy()

    @pytest.mark.parametrize("policy", [True, False])
    @pytest.mark.parametrize("client", [None, 0, 1])
    def test_a_client_may_opt_out_and_never_in(self, policy: bool, client: int | None) -> None:
        given = {} if client is None else {"headrace_draft": client, "headrace_keep": client}
        told = request_arguments(given, tenant="a", drafts=policy, keeps=policy)
        assert list(told) == ["headrace"]
        facts = facts_of(1, None, told)
        wanted = policy and client != 0
        assert (facts.drafts, facts.keeps) == (wanted, wanted)

    def test_a_request_that_is_not_kept_is_drafted_for(self) -> None:
        facts = facts_of(1, None, request_arguments({"headrace_keep": 0}, tenant="a"))
        assert (facts.drafts, facts.keeps) == (True, False)

    def test_the_tenant_is_the_servers_word(self) -> None:
        told = request_arguments({"headrace": {"tenant": "b", "keeps": True}}, tenant="a")
        assert facts_of(1, None, told).tenant == "a"
        assert tenant_key("a") != tenant_key("b") != PUBLIC_KEY
