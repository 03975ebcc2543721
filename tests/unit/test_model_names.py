"""Names of models in requests: own names, aliases, the default, weights, and limits of keys."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.models.adapter_names import AdapterNames
from headrace.gateway.models.model_names import (
    ModelNames,
    NoModelNamedError,
    UnknownModelError,
    conversation_key,
)
from headrace_engine.adapters.settings import AdapterSettings

THREE = ModelNames(
    ("small", "v1", "v2"), {"gpt": {"small": 1.0}, "chat": {"v1": 9.0, "v2": 1.0}}, "gpt"
)
CONVERSATIONS = [b"%d" % n for n in range(4000)]


def test_a_model_has_its_own_name() -> None:
    assert [THREE.resolve(name) for name in ("small", "v1", "v2")] == ["small", "v1", "v2"]


def test_an_alias_means_its_model() -> None:
    assert THREE.resolve("gpt") == "small"


def test_a_request_without_a_name_gets_the_default() -> None:
    assert THREE.resolve(None) == "small"
    assert ModelNames(("only",)).resolve(None) == "only"


def test_without_a_default_one_of_several_models_must_be_named() -> None:
    with pytest.raises(NoModelNamedError):
        ModelNames(("a", "b")).resolve(None)


@pytest.mark.parametrize("name", ["", "Small", "smal", "chat2"])
def test_of_several_models_none_gets_an_unknown_name(name: str) -> None:
    with pytest.raises(UnknownModelError) as caught:
        THREE.resolve(name)
    assert caught.value.name == name


def test_the_only_model_gets_unknown_names_too_because_its_replicas_answer_for_them() -> None:
    assert ModelNames(("only",)).resolve("an-adapter") == "only"


def test_a_key_is_limited_to_names_and_not_to_what_they_mean() -> None:
    assert THREE.resolve("chat", b"", {"chat"}) in ("v1", "v2")
    for name in ("v1", "small", "gpt", None):
        with pytest.raises(UnknownModelError):
            THREE.resolve(name, b"", {"chat"})
    with pytest.raises(UnknownModelError):
        ModelNames(("only",)).resolve("an-adapter", b"", {"only"})


class TestAdapters:
    """LoRA adapters of `base` (by name, added, and in a folder) and of `other` (by name)."""

    @pytest.fixture
    def names(self) -> ModelNames:
        adapters = AdapterNames(
            {
                "base": AdapterSettings("base", {"sql": "/sql"}, "/all"),
                "other": AdapterSettings("other", {"fr": "/fr"}),
            }
        )
        adapters.set_added("base", ["added"])
        return ModelNames(("base", "other", "none"), {"chat": {"other": 1.0}}, adapters=adapters)

    def test_an_adapter_is_its_base_models(self, names: ModelNames) -> None:
        found = {name: names.resolve(name) for name in ("sql", "added", "base:any", "fr")}
        assert found == {"sql": "base", "added": "base", "base:any": "base", "fr": "other"}
        for name in ("gone", "other:any", "none:any", "bas"):
            with pytest.raises(UnknownModelError):
                names.resolve(name)

    def test_aliases_and_models_come_first(self) -> None:
        settings = {"base": AdapterSettings("base", {"chat": "/a", "other": "/b"})}
        names = ModelNames(
            ("base", "other"), {"chat": {"other": 1.0}}, None, AdapterNames(settings)
        )
        assert (names.resolve("chat"), names.resolve("other")) == ("other", "other")

    def test_a_key_for_a_model_may_use_its_adapters(self, names: ModelNames) -> None:
        for name in ("base", "sql", "added", "base:any"):
            assert names.resolve(name, b"", {"base"}) == "base"
            with pytest.raises(UnknownModelError):
                names.resolve(name, b"", {"other", "chat"})
        assert names.resolve("sql", b"", {"sql"}) == "base"
        with pytest.raises(UnknownModelError):
            names.resolve("fr", b"", {"chat"})  # the alias allows no names of its model

    def test_a_key_for_the_only_model_may_use_its_adapters(self) -> None:
        settings = {"only": AdapterSettings("only", {"sql": "/sql"})}
        names = ModelNames(("only",), adapters=AdapterNames(settings))
        assert names.resolve("sql", b"", {"only"}) == "only"
        assert names.resolve("unknown") == "only"
        with pytest.raises(UnknownModelError):
            names.resolve("sql", b"", {"chat"})

    def test_the_folder_of_the_longest_name_counts(self) -> None:
        both = {name: AdapterSettings(name, {}, "/all") for name in ("a", "a:b")}
        names = ModelNames(("a", "a:b"), adapters=AdapterNames(both))
        assert (names.resolve("a:b:c"), names.resolve("a:c")) == ("a:b", "a")

    def test_a_name_that_means_something_else_cannot_be_added(self, names: ModelNames) -> None:
        assert names.why_not_adapter("chat", "base") == "'chat' is an alias"
        assert names.why_not_adapter("none", "base") == "'none' is a model"
        assert names.why_not_adapter("sql", "other") == "'sql' is an adapter of 'base'"
        assert names.why_not_adapter("base:x", "other") == "'base:x' is an adapter of 'base'"
        for name in ("new", "added", "base:x"):
            assert names.why_not_adapter(name, "base") is None


def test_a_key_lists_the_names_that_it_may_use() -> None:
    assert THREE.listed(None) == ["small", "v1", "v2", "gpt", "chat"]
    assert THREE.listed({"chat", "v2", "gone"}) == ["v2", "chat"]


def test_names_decide_nothing_only_if_there_is_one_model_without_aliases() -> None:
    assert not ModelNames(("only",))
    assert ModelNames(("a", "b")) and ModelNames(("only",), {"alias": {"only": 1.0}})


def test_weights_divide_the_conversations() -> None:
    found = Counter(THREE.resolve("chat", each) for each in CONVERSATIONS)
    assert 0.08 < found["v2"] / len(CONVERSATIONS) < 0.12


def test_a_higher_weight_moves_conversations_to_that_model_only() -> None:
    more = ModelNames(THREE.models, {"chat": {"v1": 9.0, "v2": 9.0}})
    before = [THREE.resolve("chat", each) for each in CONVERSATIONS]
    after = [more.resolve("chat", each) for each in CONVERSATIONS]
    moved = {pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]}
    assert moved == {("v1", "v2")}
    assert 0.46 < Counter(after)["v2"] / len(CONVERSATIONS) < 0.54


@given(st.dictionaries(st.text(max_size=5), st.floats(1e-9, 1e9), min_size=1), st.binary())
def test_an_alias_always_means_one_of_its_models_and_the_same_again(
    weights: dict[str, float], conversation: bytes
) -> None:
    names = ModelNames((*weights, "another"), {"chat-alias": weights})
    chosen = names.resolve("chat-alias", conversation)
    assert chosen in weights and names.resolve("chat-alias", conversation) == chosen


SYSTEM = {"role": "system", "content": "You are helpful." * 500}


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    turned = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return {"messages": [SYSTEM, *turned]}


def test_the_turns_of_a_conversation_have_one_key() -> None:
    first, later = chat("Hello"), chat("Hello", "Hi", "How are you?")
    assert conversation_key(first, "shop") == conversation_key(later, "shop")


@pytest.mark.parametrize(
    "other",
    [
        chat("Hullo"),
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"system": "Be brief.", **chat("Hello")},
    ],
)
def test_other_conversations_have_other_keys(other: dict[str, Any]) -> None:
    assert conversation_key(chat("Hello"), "shop") != conversation_key(other, "shop")
    assert conversation_key(chat("Hello"), "shop") != conversation_key(chat("Hello"), "bank")


def test_long_shared_instructions_do_not_make_conversations_one() -> None:
    shared = "Answer from this document: " + "x" * 100_000
    keys = {conversation_key(chat(f"{shared} {question}"), None) for question in "abc"}
    assert len(keys) == 3 and all(len(key) < 20_000 for key in keys)


def test_responses_and_completions_have_conversations_too() -> None:
    one = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    more = [*one, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Bye"}]
    assert conversation_key({"input": one}, None) == conversation_key({"input": more}, None)
    assert conversation_key({"input": "Hello"}, None) != conversation_key({"input": "Bye"}, None)
    assert conversation_key({"prompt": "Hello"}, None) != conversation_key({"prompt": "Bye"}, None)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
FIELDS = st.sampled_from(["messages", "input", "prompt", "system", "instructions"])


@given(st.dictionaries(FIELDS, JSON))
def test_any_body_has_a_key(request_body: dict[str, Any]) -> None:
    assert isinstance(conversation_key(request_body, None), bytes)
