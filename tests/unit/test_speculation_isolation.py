"""What keeps tenants apart in the engine's memory unless `speculation:` switches it off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.speculation import SpeculationSection
from headrace.speculation import add_speculation
from headrace_decode.speculative.draft import Source
from headrace_decode.speculative.proposer import HeadraceProposer, load_memory
from headrace_decode.speculative.retrieval.draft_memory import PUBLIC_KEY, Memory, tenant_key
from headrace_decode.speculative.settings import CONFIG_KEY, Settings

MODEL = SimpleNamespace(
    model="m", revision=None, dtype="x", quantization=None, tokenizer="t", tokenizer_revision=None
)


def memory(**section: Any) -> Memory:
    """The decode engine's memory under this section."""
    engine: dict[str, Any] = {}
    assert add_speculation(SpeculationSection(enabled=True, **section), engine)
    return load_memory(Settings.read(engine["additional_config"][CONFIG_KEY]), MODEL)


def test_a_section_that_is_off_changes_nothing() -> None:
    engine: dict[str, Any] = {}
    assert not add_speculation(SpeculationSection(), engine)
    assert engine == {}


def test_nothing_is_for_all_tenants_unless_switched_on() -> None:
    assert not any(memory().may_hold(PUBLIC_KEY, source) for source in Source)
    assert memory().may_hold(tenant_key("a"), Source.OPERATOR)
    shared = memory(corpora=True)
    assert [source for source in Source if shared.may_hold(PUBLIC_KEY, source)] == [Source.OPERATOR]
    common = memory(shared_k=3)
    assert common.settings.shared_k == 3
    assert [source for source in Source if common.may_hold(PUBLIC_KEY, source)] == [Source.RESPONSE]


def test_isolation_is_no_matter_of_the_drafters_own_options() -> None:
    with pytest.raises(ValueError, match="for_all"):
        memory(drafter_options={"for_all": [Source.RESPONSE]})


@pytest.mark.parametrize(("bound", "answer"), [(True, {"corpora": []}), (False, {})])
def test_only_the_worker_that_drafts_answers_for_the_memory(
    bound: bool, answer: dict[str, Any]
) -> None:
    proposer = object.__new__(HeadraceProposer)
    proposer._engine = SimpleNamespace() if bound else None  # type: ignore[assignment]
    proposer.corpora = SimpleNamespace(command=lambda command: {"corpora": []})  # type: ignore[assignment]
    assert proposer.memory_command({"do": "list"}) == answer


def test_a_drafter_without_memory_says_what_to_set() -> None:
    proposer = object.__new__(HeadraceProposer)
    proposer._engine, proposer.corpora = SimpleNamespace(), None  # type: ignore[assignment]
    answer = proposer.memory_command({"do": "list"})
    assert answer == {"error": "speculation.drafter keeps no memory: set it to memory"}
