"""The section `gateway.usage`: the ledger of what requests cost."""

from __future__ import annotations

from pydantic import Field

from headrace.config.section import Section


class UsageSettings(Section):
    """The ledger of usage by tenant and model, hour by hour (`headrace usage`)."""

    enabled: bool = Field(
        default=True,
        description="Keep what requests cost by tenant and model, where conversation state is kept "
        "(`gateway.conversations.folder` or `object_url`, in a file of its own). false: only the "
        "metrics and the usage of the last requests.",
    )
    ttl_s: float = Field(
        default=34_560_000,
        ge=86_400,
        le=315_360_000,
        description="Seconds for which a day is kept; 400 days by default.",
    )
