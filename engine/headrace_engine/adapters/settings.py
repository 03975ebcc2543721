"""The adapters of a model as configured, and the names that they may have. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_NAME_CHARS = 128
MAX_ADAPTERS = 256
"""Maximum number of adapters that one model has."""
FETCH_TIMEOUT_S = 30.0
"""Time limit of fetching one adapter, as `download_timeout_s` in Ray's `LoraConfig`."""


@dataclass(frozen=True)
class AdapterSettings:
    """The adapters of one model.

    Attributes:
        model_id: the base model's name.
        sources: source of each adapter that the configuration names, by name.
        loading_path: folder or URI whose subfolders are adapters, too; the adapter in the subfolder
            `sql` has the name `MODEL_ID:sql`, as in Ray's app. None for none.
        fetch_timeout_s: time limit of fetching one adapter; None for none, as Ray's `lora_config`
            may say.
        group: the model's name in the configuration; empty if it is the app's only model.
    """

    model_id: str
    sources: Mapping[str, str] = field(default_factory=dict)
    loading_path: str | None = None
    fetch_timeout_s: float | None = FETCH_TIMEOUT_S
    group: str = ""


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter that a decode replica asks a prefill replica for.

    Attributes:
        digest: of its content, 32 hexadecimal digits.
        source: where the decode replica has it from.
    """

    name: str
    digest: str
    source: str


def normal_source(path: str) -> str:
    """Return where an adapter of this path is: an absolute path or a URI is its own source, and
    any other text names a repository of the Hugging Face hub, as in vLLM."""
    return path if "://" in path or path.startswith(("/", "~")) else f"hf://{path}"


def why_bad_name(name: str, model_id: str) -> str | None:
    """Return why an adapter cannot have this name; None if it can."""
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        return (
            f"the name of an adapter has 1 to {MAX_NAME_CHARS} printable characters, and no space "
            "at either end"
        )
    if name == model_id:
        return f"{name!r} is the model's own name"
    return None
