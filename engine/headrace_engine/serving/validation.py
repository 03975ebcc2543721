"""Bounded validation of requests in a FastAPI application, such as vLLM's.

FastAPI has pydantic find every fault of a body, and vLLM writes them all, each with the input that
it is about. A list of 16,000 malformed items then takes half a minute and gigabytes on the event
loop that serves every stream. Here the validation of a list ends at its first malformed item, and
an answer has at most `MAX_ERRORS` faults, without input. `long_validation` is for long lists of
valid items.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import SchemaValidator
from pydantic_core.core_schema import no_info_before_validator_function
from starlette.middleware import Middleware
from starlette.requests import Request

from headrace_engine.serving.long_validation import FOUND, LongValidation, TimeSlicer

OPENAI = "/v1/"
"""Beginning of the paths whose long bodies are validated beside the event loop."""
MAX_ERRORS = 20
MAX_MESSAGE_CHARS = 300
"""Maximum characters of one fault: validators of vLLM put values of the request into theirs."""
_LISTS = frozenset({"list", "tuple", "set", "frozenset", "dict"})
"""Kinds of pydantic-core's schemas that can end at the first fault."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NO_SCHEMA = frozenset({"metadata", "default", "cls", "serialization"})
_SHORT_ITEMS = frozenset({"int", "float", "str", "bool"})
"""Kinds of items that take less time than a call of Python."""
Rest = Callable[[Any], Any]


def bound_validation(app: FastAPI) -> None:
    """Bound the time that requests are validated for, and the answer to malformed ones.

    Call it before the first request.
    """
    slicer, validators = TimeSlicer(), {}
    for route in app.routes:
        if isinstance(route, APIRoute):
            for field in route.dependant.body_params:
                adapter = FailFastAdapter(field._type_adapter, slicer.rest)
                field._type_adapter = adapter  # type: ignore[assignment]
                if route.path.startswith(OPENAI):
                    validators[route.path] = adapter.validate_resting
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(ValidationError, _on_invalid)
    # The innermost one: all others see the body.
    app.user_middleware.append(Middleware(LongValidation, validators=validators, slicer=slicer))
    app.middleware_stack = None  # vLLM has built it already; the next request builds it again


class FailFastAdapter:
    """A pydantic `TypeAdapter` whose validation ends at the first malformed item of each list.

    Valid values, and their results, are the same.

    Args:
        adapter: the adapter.
        rest: called with each item of a list in `validate_resting`, and returns the item.
    """

    def __init__(self, adapter: Any, rest: Rest | None = None) -> None:
        self._adapter, self._rest = adapter, rest
        self._validator = _validator_of(failing_fast(adapter.core_schema))

    def validate_python(self, value: Any, **options: Any) -> Any:
        """Validate, as `TypeAdapter.validate_python` does.

        If a thread has validated this task's request already, return what it found.
        """
        if found := FOUND.get():
            return found.pop().get()
        return self._validator.validate_python(value, **options)

    def validate_resting(self, value: Any) -> Any:
        """Validate as a route does, and call `rest` often."""
        return self._resting.validate_python(value, from_attributes=True)

    @cached_property
    def _resting(self) -> SchemaValidator:
        return _validator_of(failing_fast(self._adapter.core_schema, self._rest))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


def failing_fast(schema: Any, rest: Rest | None = None) -> Any:
    """Return a copy of a core schema in which validation of a list ends at its first fault.

    Args:
        schema: the schema.
        rest: if given, it is called with each item of a list before the item is validated.
    """
    if isinstance(schema, Mapping):
        kind = schema.get("type")
        kept = _NO_SCHEMA if isinstance(kind, str) else ()  # else its keys are names of fields
        copied = {
            key: value if key in kept else failing_fast(value, rest)
            for key, value in schema.items()
        }
        if isinstance(kind, str) and kind in _LISTS:
            copied["fail_fast"] = True
            items = copied.get("items_schema")
            if rest and isinstance(items, dict) and items["type"] not in _SHORT_ITEMS:
                copied["items_schema"] = no_info_before_validator_function(rest, items)
        return copied
    if type(schema) in (list, tuple):
        return type(schema)(failing_fast(each, rest) for each in schema)
    return schema


def _validator_of(schema: Any) -> SchemaValidator:
    # Without it pydantic-core uses the validators that the models have already.
    return SchemaValidator(schema, _use_prebuilt=False)


def message_of(faults: Sequence[Any]) -> str:
    """Describe faults to a person, at most `MAX_ERRORS` of them."""
    lines = [f"  {_line(fault)}" for fault in faults[:MAX_ERRORS]]
    count = f"{len(faults)} validation error{'s' if len(faults) != 1 else ''}"
    if len(faults) > MAX_ERRORS:
        count += f", the first {MAX_ERRORS}"
    return "\n".join([f"{count}:", *lines])


def place_of(fault: Any) -> str:
    """Return the field that a fault is in, such as `messages.0.content`."""
    path: Iterable[Any] = fault.get("loc", ()) if isinstance(fault, Mapping) else ()
    parts = [str(part) for part in path]
    # Names of a union's branches such as `list[union[...]]` are not the client's.
    return ".".join(part for part in parts if part != "body" and not set(part) & set("[]()"))


def _line(fault: Any) -> str:
    said = str(fault.get("msg", "")) if isinstance(fault, Mapping) else str(fault)
    place = place_of(fault)
    line = _ADDRESS.sub("", f"{place}: {said}" if place else said)
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[: MAX_MESSAGE_CHARS - 3]}..."


def _param(faults: Sequence[Any]) -> str | None:
    """Return the field to blame: the one that a validator of vLLM names, or the first one."""
    for fault in faults:
        context = fault.get("ctx") if isinstance(fault, Mapping) else None
        cause = context.get("error") if isinstance(context, Mapping) else None
        named = getattr(cause, "parameter", None)
        if isinstance(named, str):
            return named
    return place_of(faults[0])[:MAX_MESSAGE_CHARS] or None if faults else None


async def _on_invalid(request: Request, error: Any) -> JSONResponse:
    """Answer 400 in the shape of vLLM's errors."""
    if isinstance(error, ValidationError):
        faults: Sequence[Any] = error.errors(include_url=False, include_input=False)
    else:
        faults = error.errors()
    told = {
        "message": message_of(faults),
        "type": "Bad Request",
        "param": _param(faults),
        "code": 400,
    }
    return JSONResponse({"error": told}, status_code=400)
