"""The base class of all sections of the configuration file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

GIB = 2**30


class Section(BaseModel):
    """A section of the file. Unknown fields are errors, and values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
