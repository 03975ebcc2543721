"""The section `gateway.conversations`: responses and conversations that the gateway keeps."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from headrace.config.section import AbsolutePath, ObjectUrl, Section


class ConversationSettings(Section):
    """Conversation state: what `store`, `previous_response_id`, `background` and
    `/v1/conversations` need."""

    enabled: bool = Field(
        default=True,
        description="Keep the responses of `/v1/responses` (unless a request has `store: false`) "
        "and conversations, encrypted. false: nothing is kept, and `previous_response_id` is "
        "answered 404.",
    )
    folder: AbsolutePath | None = Field(
        default=None,
        min_length=1,
        description="Absolute path of a folder on a local disk for the SQLite file, which the "
        "gateways of a machine share. null: a folder of the Ray session, which ends with the "
        "cluster. A folder of your own outlives the app if `store.node.secret` is set.",
    )
    object_url: ObjectUrl | None = Field(
        default=None,
        description="Object store in place of the file, for gateways on several machines: "
        "`s3://BUCKET/PREFIX`, `gs://`, `az://` or `file:///FOLDER`, for nothing else. Its options "
        "are `store.object_options`. Needs the extra `headrace[object]`. null: the file.",
    )
    ttl_s: float = Field(
        default=86_400,
        gt=0,
        le=315_360_000,
        description="Seconds for which a conversation, or a response with all that continue it, "
        "is kept after its last write.",
    )
    max_tenant_bytes: int = Field(
        default=256_000_000,
        ge=100_000,
        description="Maximum bytes that are kept for a tenant, or without keys for all clients. "
        "The conversation with the oldest last write goes first.",
    )
    max_background: int = Field(
        default=64,
        ge=1,
        le=10_000,
        description="Maximum background responses of a model that a gateway has queued or runs; "
        "a further one is answered 429.",
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.folder is not None and self.object_url is not None:
            raise ValueError("folder: is not used beside object_url; set one of them")
        return self
