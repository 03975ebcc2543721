"""Looks up what we take from Ray and vLLM, and says what to mend when it has moved."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest


def find(name: str, mend: str) -> Any:
    """The object at `module:qualified.name`."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{name} is gone ({error}): mend {mend}")
    return found


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def assert_takes(name: str, mend: str, *wanted: str) -> None:
    """The callable at `name` has these parameters."""
    has = parameters(find(name, mend))
    missing = [parameter for parameter in wanted if parameter not in has]
    assert not missing, f"{name} no longer takes {missing} but {list(has)}: mend {mend}"


def assert_fields(name: str, mend: str, *wanted: str) -> None:
    """The dataclass at `name` has these fields."""
    has = {field.name for field in dataclasses.fields(find(name, mend))}
    missing = sorted(set(wanted) - has)
    assert not missing, f"{name} no longer has {missing} but {sorted(has)}: mend {mend}"
