"""SLO classes: their targets, and the choice of a request's class.

A request names its class in the header `x-headrace-slo`, or in its body as `vllm_xargs.slo`. A
request that names none has its key's class, else the default class. A key may be limited to some
classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

HEADER = b"x-headrace-slo"
FIELD = "slo"
"""Name of the class's field in a request's `vllm_xargs`."""


class ClassError(ValueError):
    """The error of a request that names a class that it cannot have. The text says why.

    Args:
        param: the header or the field that names the class.
    """

    def __init__(self, text: str, param: str) -> None:
        super().__init__(text)
        self.param = param


@dataclass(frozen=True, slots=True)
class SloClass:
    """The targets of one SLO class.

    Attributes:
        ttft_target_s: maximum time to the first token, in seconds; None for no target.
        itl_target_s: longest engine step that its streams should see; None for no target.
        priority: a request passes its own tenant's requests of lower priority.
        max_wait_s: maximum time in the queue for a class without a TTFT target.
        background: whether its requests are sent only while no request of another class waits and
            no engine has a prompt to compute.
    """

    name: str
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    priority: int = 0
    max_wait_s: float = 120.0
    background: bool = False

    @property
    def patience_s(self) -> float:
        """Seconds from a request's arrival until which it must have its first token."""
        return self.max_wait_s if self.ttft_target_s is None else self.ttft_target_s


DEFAULT = SloClass("default")
"""Class of requests for which no class is configured."""


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """The settings of admission.

    Attributes:
        classes: SLO classes by name.
        default_class: name of the class of requests that name none; None for `DEFAULT`.
        max_waiting: maximum number of requests in the queue.
        requests_per_replica: maximum number of requests at each replica at once, while no replica
            has reported its engine's step times.
    """

    classes: Mapping[str, SloClass] = field(default_factory=dict)
    default_class: str | None = None
    max_waiting: int = 1024
    requests_per_replica: int = 64

    @classmethod
    def of(cls, settings: object) -> AdmissionOptions:
        """Return the options from a mapping, or from any object with such attributes."""
        if isinstance(settings, cls):
            return settings
        given = {each.name: _value(settings, each.name) for each in fields(cls)}
        given = {name: value for name, value in given.items() if value is not None}
        classes = given.pop("classes", {})
        return cls({name: _class(name, told) for name, told in classes.items()}, **given)

    def choose(
        self,
        header: bytes | None,
        request: Mapping[str, Any],
        of_key: str | None = None,
        allowed: Collection[str] | None = None,
    ) -> SloClass:
        """Return the class of a request.

        Args:
            header: the value of `HEADER`.
            request: the decoded body, not yet checked.
            of_key: the name of the class of the request's key.
            allowed: the only classes that the key may name; None for all.

        Raises:
            ClassError: there is no such class, or the key may not name it.
        """
        param, named = "x-headrace-slo", None if header is None else header.decode("latin-1")
        if named is None:
            extra = request.get("vllm_xargs")
            value = extra.get(FIELD) if isinstance(extra, Mapping) else None
            param = f"vllm_xargs.{FIELD}"
            if value is not None and not isinstance(value, str):
                raise ClassError(f"{param} must be the name of an SLO class.", param)
            named = value
        if named is None:
            named = of_key or self.default_class
            return DEFAULT if named is None else self.classes.get(named, DEFAULT)
        found = self.classes.get(named)
        if found is None or (allowed is not None and named not in allowed):
            raise ClassError(_unknown(named, self.classes, allowed), param)
        return found


def _unknown(named: str, classes: Collection[str], allowed: Collection[str] | None) -> str:
    known = sorted(name for name in classes if allowed is None or name in allowed)
    may = f"This key may name: {', '.join(known)}." if known else "There is none to name."
    return f"There is no SLO class '{named[:64]}' for this request. {may}"


def _value(settings: object, name: str) -> Any:
    if isinstance(settings, Mapping):
        return settings.get(name)
    return getattr(settings, name, None)


def _class(name: str, told: object) -> SloClass:
    if isinstance(told, SloClass):
        return told
    names = [each.name for each in fields(SloClass) if each.name != "name"]
    given = {each: _value(told, each) for each in names}
    return SloClass(name, **{each: value for each, value in given.items() if value is not None})
