"""The models in an app's arguments: the engines of each, and its own sections.

With one model, the arguments are those of `ray.serve.llm:build_pd_openai_app`. With several, each
entry of `models` has its `prefill_config` and `decode_config`, and may have a section `headrace`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.checks.model_names import model_conflicts
from headrace.config.conflicts import technique_conflicts
from headrace.config.models import MAX_MODELS, MODEL_KEY, merge
from headrace.config.schema import AppSection, ModelAppSection
from headrace.deploy.adapters import take_adapters, with_readable_paths
from headrace_engine.adapters.settings import AdapterSettings
from headrace_engine.ray.llm import PDServingArgs
from headrace_engine.serving.request_router import deployment_name

CONFIGS = ("prefill_config", "decode_config")


@dataclass(frozen=True)
class AppModel:
    """One model of an app.

    Attributes:
        key: its name in `models`; empty if it is the app's only one.
        pd: its engines, with the app's ingress.
        section: its own sections.
        adapters: its LoRA adapters, which its replicas load; None without any.
    """

    key: str
    pd: PDServingArgs
    section: ModelAppSection
    adapters: AdapterSettings | None

    @property
    def model_id(self) -> str:
        """The name by which its replicas know it."""
        return str(self.pd.decode_config.model_id)

    @property
    def engines(self) -> list[dict[str, Any]]:
        """The engine arguments of its prefill and its decode role."""
        return [self.pd.prefill_config.engine_kwargs, self.pd.decode_config.engine_kwargs]

    def deployment(self, role: str) -> str:
        """Return the name of a role's deployment."""
        return deployment_name(role, self.key)


def app_models(args: Mapping[str, Any], section: AppSection) -> list[AppModel]:
    """Return the models of an app, in the order of the arguments.

    Args:
        args: the arguments of `build_app`.
        section: their section `headrace`, whose values a model has where it sets none.

    Raises:
        pydantic.ValidationError: a field is unknown or its value impossible.
        ValueError: the models' names or techniques do not fit together.
    """
    shared = {name: value for name, value in args.items() if name not in ("headrace", "models")}
    entries = args.get("models")
    if entries is None:
        own = ModelAppSection(**{name: getattr(section, name) for name in _OWN})
        found = [_model("", shared, own, section)]
    else:
        found = _several(entries, shared, section)
    ids = {model.key: model.model_id for model in found}
    names = {one.key: () if one.adapters is None else one.adapters.sources for one in found}
    wrong = list(model_conflicts(section.gateway, ids, names))
    if wrong:
        raise ValueError("; and ".join(f"{field}: {what}" for field, what in wrong))
    return found


_OWN = tuple(ModelAppSection.model_fields)


def _several(entries: Any, shared: dict[str, Any], section: AppSection) -> list[AppModel]:
    if not isinstance(entries, Mapping) or not 1 <= len(entries) <= MAX_MODELS:
        raise ValueError(f"models: must be a mapping with 1 to {MAX_MODELS} models")
    for name in CONFIGS:
        if name in shared:
            raise ValueError(f"{name}: has no effect beside models; set models.NAME.{name}")
    defaults = section.model_dump(include=set(_OWN))
    return [_entry(key, entry, shared, section, defaults) for key, entry in entries.items()]


def _entry(
    key: Any,
    entry: Any,
    shared: dict[str, Any],
    section: AppSection,
    defaults: dict[str, Any],
) -> AppModel:
    if not re.fullmatch(MODEL_KEY, str(key)):
        raise ValueError(f"models.{key}: must have lower-case letters, digits and -, at most 31")
    unknown = set(entry) - {*CONFIGS, "headrace"} if isinstance(entry, Mapping) else {"value"}
    if unknown:
        raise ValueError(f"models.{key}: may have {', '.join(CONFIGS)} and headrace only")
    configs = {name: value for name, value in entry.items() if name in CONFIGS}
    own = ModelAppSection.model_validate(merge(defaults, entry.get("headrace") or {}))
    for field, what in technique_conflicts(own.techniques, section.store):
        raise ValueError(f"models.{key}.headrace.{field}: {what}")
    return _model(str(key), {**shared, **configs}, own, section)


def _model(
    key: str, args: Mapping[str, Any], own: ModelAppSection, section: AppSection
) -> AppModel:
    pd = PDServingArgs.model_validate(with_readable_paths(args))
    try:
        adapters = take_adapters(pd, key)
    except ValueError as error:
        raise ValueError(f"{f'models.{key}.' if key else ''}{error}") from None
    return AppModel(key, pd, own, adapters)
