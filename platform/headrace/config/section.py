"""The base class of all sections of the configuration file."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

GIB = 2**30

Resources = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_./-]*$")], Annotated[float, Field(gt=0)]
]
"""Ray's custom resources, by name."""


class Section(BaseModel):
    """A section of the file. Unknown fields are errors, and values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
