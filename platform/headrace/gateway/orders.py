"""What an operator may change while the app runs: where prompts are prefilled, how it drafts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.gateway.limits import wrong_field
from headrace_decode.speculation.order import FOR_MAX_S


def _without_default(schema: dict[str, Any]) -> None:
    del schema["default"]


class RouterPolicy(BaseModel):
    """Where prompts are prefilled: always here, always remotely, or wherever it costs least."""

    model_config = ConfigDict(extra="forbid", strict=True)

    policy: Literal["cost", "local", "remote"]


class Speculation(BaseModel):
    """How far decode replicas draft: `mode`, `draft_cap` or both."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: Annotated[str, Field(pattern=r"^(auto|off|static:[1-9][0-9]{0,2})$")] = Field(
        default="auto", description="`auto`, `off`, or `static:K` for K tokens a request."
    )
    draft_cap: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Most draft tokens a step; null for no cap."
    )
    for_s: float = Field(
        default=FOR_MAX_S,
        gt=0,
        le=FOR_MAX_S,
        description="Seconds until the change ends by itself; left out, it stays.",
        json_schema_extra=_without_default,
    )

    @model_validator(mode="after")
    def _says_something(self) -> Speculation:
        if not self.model_fields_set & {"mode", "draft_cap"}:
            raise wrong_field("mode", "give mode, draft_cap or both")
        return self
