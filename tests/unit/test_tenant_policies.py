"""Speculative decoding by tenant: the operator's policy, and the fields that a client may set."""

from __future__ import annotations

import pytest

from headrace.config.speculation import SpeculationSection
from headrace.deploy.speculative_decoding import tenants_of
from headrace_decode.speculative.request_info import parse_request_info, request_arguments
from headrace_decode.speculative.retrieval.draft_memory import PUBLIC_KEY, tenant_key
from headrace_decode.speculative.tenant_policies import TenantPolicy, Tenants


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
        facts = parse_request_info(1, None, told)
        wanted = policy and client != 0
        assert (facts.drafts, facts.keeps) == (wanted, wanted)

    def test_a_request_that_is_not_kept_is_drafted_for(self) -> None:
        facts = parse_request_info(1, None, request_arguments({"headrace_keep": 0}, tenant="a"))
        assert (facts.drafts, facts.keeps) == (True, False)

    def test_the_tenant_is_the_servers_word(self) -> None:
        told = request_arguments({"headrace": {"tenant": "b", "keeps": True}}, tenant="a")
        assert parse_request_info(1, None, told).tenant == "a"
        assert tenant_key("a") != tenant_key("b") != PUBLIC_KEY
