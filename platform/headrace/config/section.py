"""What all parts of the configuration file have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

GIB = 2**30


class Section(BaseModel):
    """A part of the file. Unknown fields are errors, and values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
