"""Two identities are the same only if every field is, whatever the fields hold."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace_kvstore.identity.namespace import KvIdentity, Namespace

TEXT = st.text(st.sampled_from('ab",:{}\\ é\n'), min_size=1, max_size=6)
SIZE = st.integers(1, 3)


def made(of: type[Any]) -> st.SearchStrategy[Any]:
    fields = {field.name: SIZE if field.type == "int" else TEXT for field in dataclasses.fields(of)}
    return st.builds(of, **fields)


@given(made(KvIdentity), made(KvIdentity))
def test_identities_are_equal_only_field_by_field(one: KvIdentity, other: KvIdentity) -> None:
    assert (one.encoding == other.encoding) == (one == other)


@given(st.data(), made(Namespace))
def test_one_field_more_or_less_alike_makes_another_namespace(
    data: st.DataObject, space: Namespace
) -> None:
    field = data.draw(st.sampled_from(dataclasses.fields(Namespace)))
    value = data.draw(SIZE if field.type == "int" else TEXT)
    other = dataclasses.replace(space, **{field.name: value})
    assert (other.digest == space.digest) == (other == space)
