"""The base class of all sections of the configuration file."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

GIB = 2**30


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError(f'must be an absolute path, got "{value}"')
    return value


def _object_url(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9]+://\S+", value):
        raise ValueError(f'must be like "s3://BUCKET/PREFIX" or "file:///FOLDER", got "{value}"')
    return value


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
ObjectUrl = Annotated[str, AfterValidator(_object_url)]
"""URL of a place in an object store."""

Resources = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_./-]*$")], Annotated[float, Field(gt=0)]
]
"""Ray's custom resources, by name."""


class Section(BaseModel):
    """A section of the file. Unknown fields are errors, and values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
