"""Bodies of administrative requests: plan policy, speculation, store actions, prompts to warm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.config.key_file import NAME, ModelName
from headrace.config.speculation import MODE
from headrace.gateway.ingress.limits import wrong_field

MAX_PROMPTS = 256

Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


OneModel = Annotated[
    ModelName | None,
    Field(default=None, description="The model that it is for; left out: all models."),
]


class RouterPolicy(BaseModel):
    """Where prompts are prefilled: always here, always remotely, or wherever it costs least."""

    model_config = ConfigDict(extra="forbid", strict=True)

    policy: Literal["cost", "local", "remote"]
    model: OneModel


class SpeculationUpdate(BaseModel):
    """Changes of speculative decoding: `mode`, `draft_cap` or both."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: Annotated[str, Field(pattern=MODE)] = Field(
        default="auto", description="`auto`, `off`, or `static:K` for K tokens a request."
    )
    draft_cap: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Most draft tokens a step; null for no cap."
    )
    model: OneModel

    @model_validator(mode="after")
    def _says_something(self) -> SpeculationUpdate:
        if not self.model_fields_set & {"mode", "draft_cap"}:
            raise wrong_field("mode", "give mode, draft_cap or both")
        return self


class StoreAction(BaseModel):
    """An action on the KV blocks of every machine's store: `unpin`, `clear` or `lookup`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    action: Literal["unpin", "clear", "lookup"]
    namespace: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = Field(
        default=None, description="Digest of a namespace, as the status has it; null for all."
    )
    hash: Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,32}$")] | None = Field(
        default=None,
        description="Hash of a block: `lookup` finds it, `unpin` lets the pinned prompt go that "
        "ends with it.",
    )

    @model_validator(mode="after")
    def _fits_the_action(self) -> StoreAction:
        if self.action == "lookup" and self.hash is None:
            raise wrong_field("hash", "lookup needs the hash of a block")
        if self.action == "clear" and self.hash is not None:
            raise wrong_field("hash", "clear takes a namespace, and no hash")
        return self


class Message(BaseModel):
    """One message of a conversation; vLLM checks the rest of it."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str


class WarmRequest(BaseModel):
    """Prompts and chats, 1 to 256 together, whose KV is made now, one after the other."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompts: list[Text | TokenIds] = Field(
        default_factory=list, max_length=MAX_PROMPTS, description="Texts or lists of token ids."
    )
    chats: list[Annotated[list[Message], Field(min_length=1)]] = Field(
        default_factory=list, max_length=MAX_PROMPTS, description="Lists of messages."
    )
    tenant: Annotated[str, Field(pattern=NAME)] | None = Field(
        default=None,
        description="The tenant whose requests will use the KV; left out, the tenant of the "
        "request's own key. Only where keys are configured.",
    )
    model: ModelName | None = Field(
        default=None, description="The model or alias; left out: the default model."
    )
    cache_salt: str = Field(default="", description="The tenant's cache salt; empty for none.")
    pin: bool = Field(default=False, description="Keep the blocks in DRAM until they are unpinned.")

    @model_validator(mode="after")
    def _count(self) -> WarmRequest:
        if not 1 <= len(self.prompts) + len(self.chats) <= MAX_PROMPTS:
            raise wrong_field("prompts", f"prompts and chats must be 1 to {MAX_PROMPTS} together")
        return self

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Request bodies, each `{"prompt": text or token ids}` or `{"messages": [...]}`."""
        prompts: list[dict[str, Any]] = [{"prompt": prompt} for prompt in self.prompts]
        chats = [[message.model_dump() for message in chat] for chat in self.chats]
        return [*prompts, *({"messages": messages} for messages in chats)]
