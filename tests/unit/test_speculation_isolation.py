"""Isolation of tenants in the engine's memory, unless `speculation:` switches it off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.speculation import SpeculationSection
from headrace.deploy.speculative_decoding import add_speculative_decoding
from headrace_decode.speculative.proposer import HeadraceProposer, create_memory
from headrace_decode.speculative.retrieval.draft_memory import PUBLIC_KEY, DraftMemory, tenant_key
from headrace_decode.speculative.settings import CONFIG_KEY, SpeculationSettings

MODEL = SimpleNamespace(
    model="m", revision=None, dtype="x", quantization=None, tokenizer="t", tokenizer_revision=None
)


def memory(**section: Any) -> DraftMemory:
    """The decode engine's memory under this section."""
    engine: dict[str, Any] = {}
    assert add_speculative_decoding(SpeculationSection(enabled=True, **section), engine)
    return create_memory(SpeculationSettings.read(engine["additional_config"][CONFIG_KEY]), MODEL)


def test_a_section_that_is_off_changes_nothing() -> None:
    engine: dict[str, Any] = {}
    assert not add_speculative_decoding(SpeculationSection(), engine)
    assert engine == {}


def test_nothing_is_for_all_tenants_unless_switched_on() -> None:
    assert not memory().allows_corpora(PUBLIC_KEY)
    assert memory().allows_corpora(tenant_key("a"))
    assert memory(corpora=True).allows_corpora(PUBLIC_KEY)


def test_options_of_the_memory_cannot_weaken_isolation() -> None:
    with pytest.raises(ValueError, match="public_corpora"):
        memory(drafter_options={"public_corpora": True})


@pytest.mark.parametrize(("bound", "answer"), [(True, {"corpora": []}), (False, {})])
def test_only_the_worker_that_drafts_answers_for_the_memory(
    bound: bool, answer: dict[str, Any]
) -> None:
    proposer = object.__new__(HeadraceProposer)
    proposer._runner = SimpleNamespace() if bound else None  # type: ignore[assignment]
    proposer.corpus_manager = SimpleNamespace(command=lambda command: {"corpora": []})  # type: ignore[assignment]
    assert proposer.corpus_command({"do": "list"}) == answer
