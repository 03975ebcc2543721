"""Cache salts name their tenant, so that no salt of a client's choice reaches another's KV."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_kvstore.salts import salt_of, tenant_of

names = st.text(st.characters(exclude_characters=":"), min_size=1)


@given(names, st.text(), names, st.text())
def test_no_two_tenants_make_the_same_salt(one: str, own: str, other: str, others: str) -> None:
    assert (salt_of(one, own) == salt_of(other, others)) == ((one, own) == (other, others))


@given(names, st.text())
def test_a_salt_tells_its_tenant(tenant: str, own: str) -> None:
    assert tenant_of(salt_of(tenant, own)) == tenant


@pytest.mark.parametrize("salt", ["", "x", "tenant:", "tenant:x", "tenant::x"])
def test_where_a_salt_names_no_tenant_it_is_its_own(salt: str) -> None:
    assert tenant_of(salt) == salt


@pytest.mark.parametrize("name", ["", "a:b"])
def test_a_name_that_could_be_mistaken_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no tenant's name"):
        salt_of(name)
