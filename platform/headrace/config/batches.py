"""The section `gateway.batches`: files of requests that are run when other requests leave room."""

from __future__ import annotations

from pydantic import Field

from headrace.config.section import Section


class BatchSettings(Section):
    """Batches: `/v1/files` and `/v1/batches`. They lie where conversation state lies
    (`gateway.conversations.folder` or `object_url`), encrypted."""

    enabled: bool = Field(
        default=True,
        description="Take files and run batches. false: `/v1/files` and `/v1/batches` are answered "
        "404, and unfinished batches wait.",
    )
    lines_per_replica: int = Field(
        default=16,
        ge=1,
        le=1_000,
        description="Maximum lines in flight at each decode replica while it has no other request.",
    )
    max_lines: int = Field(
        default=50_000, ge=1, le=100_000, description="Maximum lines of a batch."
    )
    max_file_bytes: int = Field(
        default=100_000_000, ge=1_000, le=1_000_000_000, description="Maximum bytes of a file."
    )
    max_tenant_bytes: int = Field(
        default=1_000_000_000,
        ge=100_000,
        description="Maximum bytes of a tenant's files, or without keys of all files, and of the "
        "answers of one batch. A file beyond it is refused; a line beyond it fails.",
    )
    max_unfinished: int = Field(
        default=16,
        ge=1,
        le=1_000,
        description="Maximum unfinished batches of a tenant; a further one is answered 429.",
    )
    ttl_s: float = Field(
        default=604_800,
        ge=172_800,
        le=315_360_000,
        description="Seconds for which a file or a batch is kept. At least two days, since a batch "
        "may take one.",
    )
