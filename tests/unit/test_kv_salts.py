"""Cache salts name their tenant, so that no salt of a client's choice reaches another's KV."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_kvstore.identity.prompt_hash import hash_prompt, root_hash
from headrace_kvstore.identity.salts import split_salt, tenant_of, tenant_salt

names = st.text(st.characters(exclude_characters=":"), min_size=1)


@given(names, st.text(), names, st.text())
def test_no_two_tenants_make_the_same_salt(one: str, own: str, other: str, others: str) -> None:
    assert (tenant_salt(one, own) == tenant_salt(other, others)) == ((one, own) == (other, others))


@given(names, st.text())
def test_a_salt_tells_its_tenant(tenant: str, own: str) -> None:
    assert tenant_of(tenant_salt(tenant, own)) == tenant
    assert split_salt(tenant_salt(tenant, own)) == (tenant, own)


@pytest.mark.parametrize("salt", ["", "x", "tenant:", "tenant:x", "tenant::x"])
def test_where_a_salt_names_no_tenant_it_is_its_own(salt: str) -> None:
    assert tenant_of(salt) == salt
    assert split_salt(salt) == (None, salt)


def test_no_salt_is_hashed_as_an_adapters_name() -> None:
    tokens, root = range(256), root_hash("seed")
    of_adapter = hash_prompt(tokens, 128, root, lora=("sql", "/adapters/sql"))
    for salt in ("sql", "/adapters/sql", "lora"):
        assert not set(hash_prompt(tokens, 128, root, salt=salt)) & set(of_adapter)
    assert not set(hash_prompt(tokens, 128, root, lora=("sql", "/other"))) & set(of_adapter)


@pytest.mark.parametrize("name", ["", "a:b"])
def test_a_name_that_could_be_mistaken_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no tenant's name"):
        tenant_salt(name)
