"""The section `speculation`: whether and from what decode engines draft, tenant by tenant."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from headrace.config.section import Section


class TenantSettings(Section):
    """What is drafted for one tenant, and from what."""

    draft: bool = Field(
        default=True, description="Whether its requests are drafted for; else nothing is kept."
    )
    keep: bool = Field(default=True, description="Whether its answers are kept to draft from.")


class SpeculationSection(Section):
    """Drafting without a draft model, in the decode engines: how many tokens each step verifies is
    planned by what they are worth at its load."""

    enabled: bool = Field(
        default=False,
        description="Whether decode engines draft. One with its own `speculative_config` keeps "
        "that.",
    )
    draft_tokens: int = Field(
        default=16, ge=1, le=128, description="Most tokens drafted for one request in one step."
    )
    mode: str = Field(
        default="auto",
        pattern=r"^(auto|off|static:\d+)$",
        description="`auto` plans each step; `off` drafts nothing until told otherwise by `PUT "
        "/headrace/v1/speculation`; `static:K` always verifies K tokens a request.",
    )
    drafter: Literal["memory", "ngram"] = Field(
        default="memory",
        description="`memory`: the request's own text and past answers to its tenant. `ngram`: the "
        "request's own text only.",
    )
    share: bool = Field(
        default=True,
        description="Whether decode replicas draft from each other's answers to the same tenant. "
        "Needs the store (`store.enabled`), whose nodes carry them.",
    )
    drafter_options: dict[str, Any] = Field(
        default_factory=dict, description="The drafter's own settings, as docs/speculation.md says."
    )
    corpora: bool = Field(
        default=False,
        description="Whether `headrace memory load` may load texts from which every tenant's "
        "answers are drafted. Those for one tenant may always be loaded.",
    )
    shared_k: int | None = Field(
        default=None,
        ge=2,
        le=64,
        description="Windows of 15 tokens that the answers of at least so many tenants contain are "
        "drafted for every tenant. Must be more than the salts that one party may use. null: "
        "nothing of one tenant is ever drafted for another.",
    )
    tenants: dict[str, TenantSettings] = Field(
        default_factory=dict,
        description="By cache salt, `draft` and `keep`, both `true` where nothing else is said: "
        "whether a tenant's requests are drafted for, and whether its answers are kept for that. "
        '`"*"` stands for all that are not named, `""` for requests without a salt.',
    )
