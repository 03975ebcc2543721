"""The section `speculation`: speculative decoding in the decode engines, with rules by tenant."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from headrace.config.section import Section


class TenantSettings(Section):
    """Speculative decoding for one tenant."""

    draft: bool = Field(
        default=True,
        description="Use draft tokens for its requests. false: its answers are not kept either.",
    )
    keep: bool = Field(default=True, description="Keep its answers as a source of draft tokens.")


MODE = r"^(auto|off|static:[1-9][0-9]{0,2})$"
"""Modes of speculative decoding, in the configuration and in `PUT /headrace/v1/speculation`."""


class SpeculationSection(Section):
    """Speculative decoding without a draft model, in the decode engines. A planner decides in each
    step how many draft tokens are worth verifying at the current load."""

    enabled: bool = Field(
        default=False,
        description="Use speculative decoding in the decode engines. An engine with its own "
        "`speculative_config` keeps that instead.",
    )
    draft_tokens: int = Field(
        default=16, ge=1, le=128, description="Maximum draft tokens for one request in one step."
    )
    mode: str = Field(
        default="auto",
        pattern=MODE,
        description="`auto`: the planner decides in each step. `off`: no draft tokens until "
        "`PUT /headrace/v1/speculation` changes the mode. `static:K`: K tokens are verified for "
        "each request in each step.",
    )
    share: bool = Field(
        default=True,
        description="Share answers between decode replicas, within each tenant. Needs "
        "`store.enabled`: the store's nodes carry them.",
    )
    drafter_options: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the drafter; docs/speculation.md lists them."
    )
    corpora: bool = Field(
        default=False,
        description="Allow `headrace corpus load` to load corpora that are used for every tenant. "
        "Corpora for one tenant are always allowed.",
    )
    tenants: dict[str, TenantSettings] = Field(
        default_factory=dict,
        description="Rules by cache salt: `draft` (use draft tokens for its requests) and `keep` "
        "(keep its answers as a source of them), both `true` by default. "
        '`"*"` is for all tenants not named, `""` for requests without a salt.',
    )
