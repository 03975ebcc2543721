"""SLO classes: their targets, and the choice of a request's class.

A request names its class in the header `x-headrace-slo`, or in its body as `vllm_xargs.slo`. A
request that names none has its key's class, else the default class. A key may be limited to some
classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.gateway import AdmissionSettings

SLO_HEADER = b"x-headrace-slo"
SLO_FIELD = "slo"
"""Name of the class's field in a request's `vllm_xargs`."""


class SloClassError(ValueError):
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


class SloClasses:
    """The SLO classes of a configuration.

    Args:
        classes: the classes by name.
        default: name of the class of requests that name none; None for `DEFAULT`.
    """

    def __init__(
        self, classes: Mapping[str, SloClass] | None = None, default: str | None = None
    ) -> None:
        self._classes, self._default = classes or {}, default

    @classmethod
    def from_settings(cls, settings: AdmissionSettings | None) -> SloClasses:
        """Return the classes that the configuration defines; none without admission."""
        if settings is None:
            return cls()
        named = settings.classes.items()
        classes = {name: SloClass(name, **each.model_dump()) for name, each in named}
        return cls(classes, settings.default_class)

    def choose(
        self,
        header: bytes | None,
        request: Mapping[str, Any],
        of_key: str | None = None,
        allowed: Collection[str] | None = None,
    ) -> SloClass:
        """Return the class of a request.

        Args:
            header: the value of `SLO_HEADER`.
            request: the decoded body, not yet checked.
            of_key: the name of the class of the request's key.
            allowed: the only classes that the key may name; None for all.

        Raises:
            ClassError: there is no such class, or the key may not name it.
        """
        param, named = "x-headrace-slo", None if header is None else header.decode("latin-1")
        if named is None:
            extra = request.get("vllm_xargs")
            value = extra.get(SLO_FIELD) if isinstance(extra, Mapping) else None
            param = f"vllm_xargs.{SLO_FIELD}"
            if value is not None and not isinstance(value, str):
                raise SloClassError(f"{param} must be the name of an SLO class.", param)
            named = value
        if named is None:
            named = of_key or self._default
            return DEFAULT if named is None else self._classes.get(named, DEFAULT)
        found = self._classes.get(named)
        if found is None or (allowed is not None and named not in allowed):
            raise SloClassError(_unknown(named, self._classes, allowed), param)
        return found


def _unknown(named: str, classes: Collection[str], allowed: Collection[str] | None) -> str:
    known = sorted(name for name in classes if allowed is None or name in allowed)
    may = f"This key may name: {', '.join(known)}." if known else "There is none to name."
    return f"There is no SLO class '{named[:64]}' for this request. {may}"
