"""The names that requests may use for models, and the model that each of them means.

A name is an alias, a model's own, or that of a LoRA adapter of a model. An alias with several
models divides conversations among them by weight, such as a new version of a model and the present
one. A conversation is told by its messages up to the first of the user, so that it stays with its
model, where its prefix is cached. Weighted rendezvous hashing divides them: a model with weight w
scores -w / ln(u), where u is a hash of model and conversation in (0, 1), and the highest score
wins. A change of weights therefore moves no more conversations than it must.

If there is one model, it gets unknown names, too: its replicas answer for them.

Pure: no I/O.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.gateway.models.adapter_names import AdapterNames

EDGE_CHARS = 2048
"""Number of characters at each end of a message that tell conversations apart."""
MAX_FIRST_MESSAGES = 8
"""Maximum number of messages that tell conversations apart."""


class NoModelNamedError(ValueError):
    """The request names no model, and there is no default."""


class UnknownModelError(ValueError):
    """There is no model of this name, or the request's key may not use it.

    Attributes:
        name: the name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no model {name!r}")
        self.name = name


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Names of models.

    Attributes:
        models: the models' own names; at least one.
        aliases: models with their weights, by alias.
        default: name that requests without one mean; None for the only model, if there is one.
        adapters: the names of their LoRA adapters, which change while the app runs.
    """

    models: tuple[str, ...]
    aliases: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    default: str | None = None
    adapters: AdapterNames = field(default_factory=AdapterNames)

    def __bool__(self) -> bool:
        """Whether a request's name decides anything."""
        return len(self.models) > 1 or bool(self.aliases)

    def listed(self, allowed: Collection[str] | None) -> list[str]:
        """Return the models and aliases that a key may use.

        Args:
            allowed: the names to which the key is limited; None for all.
        """
        names = [*self.models, *self.aliases]
        return names if allowed is None else [name for name in names if name in allowed]

    def why_not_adapter(self, name: str, model_id: str) -> str | None:
        """Return why a model cannot get an adapter of this name; None if it can."""
        if name in self.aliases:
            return f"{name!r} is an alias"
        if name in self.models and name != model_id:
            return f"{name!r} is a model"
        if (base := self.adapters.base(name)) not in (None, model_id):
            return f"{name!r} is an adapter of {base!r}"
        return None

    def resolve(
        self, name: str | None, conversation: bytes = b"", allowed: Collection[str] | None = None
    ) -> str:
        """Return the own name of the model that a request means.

        Args:
            name: the name in the request; None if it has none.
            conversation: key of the request's conversation; see `conversation_key`.
            allowed: the names to which the request's key is limited; None for all. The name of a
                model allows its adapters, too.

        Raises:
            NoModelNamedError: no name, and no default.
            UnknownModelError: there is no such name, or the key may not use it.
        """
        if name is None:
            name = self.default or (self.models[0] if len(self.models) == 1 else None)
            if name is None:
                raise NoModelNamedError("the request names no model")
        weights = self.aliases.get(name)
        base = None
        if weights is None and name not in self.models:
            base = self.adapters.base(name)
        if allowed is not None and name not in allowed and base not in allowed:
            raise UnknownModelError(name)
        if weights is not None:
            return max(weights, key=lambda model: _score(model, weights[model], conversation))
        if name in self.models:
            return name
        if base is None and len(self.models) == 1:
            return self.models[0]
        if base is None:
            raise UnknownModelError(name)
        return base


def _score(model: str, weight: float, conversation: bytes) -> float:
    digest = hashlib.blake2b(conversation, key=model.encode()[:64], digest_size=8).digest()
    uniform = ((int.from_bytes(digest, "big") >> 11) + 0.5) / 2.0**53
    return -weight / math.log(uniform)


def conversation_key(request: Mapping[str, Any], tenant: str | None) -> bytes:
    """Return bytes that all requests of one conversation have in common.

    Args:
        request: the decoded body of a request of any API, not yet checked.
        tenant: the request's tenant; None if no keys are configured.
    """
    parts = [tenant or ""]
    for name in ("system", "instructions"):
        parts.append(_edges(request.get(name)))
    messages = request.get("messages", request.get("input"))
    if isinstance(messages, list):
        parts += _first_messages(messages)
    elif messages is None:
        parts.append(_text(request.get("prompt"))[:EDGE_CHARS])
    else:
        parts.append(_edges(messages))  # a text is the message of a user
    return "\0".join(parts).encode(errors="surrogatepass")


def _first_messages(messages: list[Any]) -> list[str]:
    """Return the texts of the messages up to the first of the user."""
    parts: list[str] = []
    for message in messages[:MAX_FIRST_MESSAGES]:
        is_message = isinstance(message, Mapping)
        parts.append(_edges(message.get("content") if is_message else message))
        if not is_message or message.get("role") == "user":
            break
    return parts


def _edges(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= 2 * EDGE_CHARS else text[:EDGE_CHARS] + text[-EDGE_CHARS:]


def _text(value: Any) -> str:
    """Return a message's text; of a list, that of its first and last parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        ends = value if len(value) <= 8 else [*value[:4], *value[-4:]]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in ends]
        return "\0".join(part if isinstance(part, str) else str(type(part)) for part in texts)
    return ""
