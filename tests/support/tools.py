"""Programs that tests use and that pip does not bring."""

from __future__ import annotations

import os

import pytest


def missing(what: str, remedy: str) -> None:
    """Skip the test; fail it where `HEADRACE_NEED_TOOLS=1` says that everything is there, as CI
    does."""
    text = f"{what} is not here; {remedy}"
    if os.environ.get("HEADRACE_NEED_TOOLS") == "1":
        pytest.fail(text)
    pytest.skip(text)
