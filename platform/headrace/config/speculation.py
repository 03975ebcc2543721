"""The section `speculation`: speculative decoding in the decode engines, with rules by tenant."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from headrace.config.section import Section


class TenantSettings(Section):
    """Speculation for one tenant."""

    draft: bool = Field(
        default=True, description="Draft for its requests. false: its answers are not kept either."
    )
    keep: bool = Field(default=True, description="Keep its answers, to draft from them later.")


MODE = r"^(auto|off|static:[1-9][0-9]{0,2})$"
"""Modes of drafting, in the configuration and in `PUT /headrace/v1/speculation`."""


class SpeculationSection(Section):
    """Speculative decoding without a draft model, in the decode engines. A planner decides in each
    step how many draft tokens are worth verifying at the current load."""

    enabled: bool = Field(
        default=False,
        description="Draft in the decode engines. An engine with its own `speculative_config` "
        "keeps that instead.",
    )
    draft_tokens: int = Field(
        default=16, ge=1, le=128, description="Maximum draft tokens for one request in one step."
    )
    mode: str = Field(
        default="auto",
        pattern=MODE,
        description="`auto`: the planner decides in each step. `off`: nothing is drafted until "
        "`PUT /headrace/v1/speculation` changes the mode. `static:K`: K tokens are verified for "
        "each request in each step.",
    )
    drafter: Literal["memory", "ngram"] = Field(
        default="memory",
        description="Source of drafts. `memory`: the request's own text and earlier answers to its "
        "tenant. `ngram`: the request's own text only.",
    )
    share: bool = Field(
        default=True,
        description="Share answers between decode replicas, within each tenant. Needs "
        "`store.enabled`: the store's nodes carry them.",
    )
    save: bool = Field(
        default=False,
        description="Save what replicas share every five minutes and at a clean end, and load it "
        "when the app starts: in `store.object_url`, or without that in `store.nvme_folder`. It "
        "holds the tokens of answers and corpora, unencrypted, and no answers of tenants with "
        "`keep: false`. Needs `share`.",
    )
    drafter_options: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the drafter; docs/speculation.md lists them."
    )
    corpora: bool = Field(
        default=False,
        description="Allow `headrace memory load` to load corpora that are used for every tenant. "
        "Corpora for one tenant are always allowed.",
    )
    shared_k: int | None = Field(
        default=None,
        ge=2,
        le=64,
        description="A run of 15 tokens that occurs in the answers of at least this many tenants "
        "is drafted for every tenant. Must be larger than the number of salts that one party may "
        "use. null: nothing of one tenant is drafted for another.",
    )
    tenants: dict[str, TenantSettings] = Field(
        default_factory=dict,
        description="Rules by cache salt: `draft` (draft for the tenant's requests) and `keep` "
        "(keep its answers to draft from), both `true` by default. "
        '`"*"` is for all tenants not named, `""` for requests without a salt.',
    )
