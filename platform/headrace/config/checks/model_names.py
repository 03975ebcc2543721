"""Checks of the names of models: their own, aliases, and the default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from headrace.config.checks.messages import did_you_mean
from headrace.config.conflicts import Problem
from headrace.config.gateway import GatewaySettings


def model_conflicts(
    gateway: GatewaySettings,
    models: Mapping[str, str],
    adapters: Mapping[str, Iterable[str]],
) -> Iterator[Problem]:
    """Yield the problems of names of models and adapters, aliases and the default model.

    Args:
        models: the names that clients send, by the models' names in `models`; one with the empty
            name without `models`.
        adapters: the names of each model's configured LoRA adapters, likewise.
    """
    seen: dict[str, str] = {}
    for key, model_id in models.items():
        if model_id in seen:
            yield (
                f"models.{key}.model.id",
                f'is "{model_id}", as models.{seen[model_id]}.model.id is; clients tell models '
                "apart by it, so set another",
            )
        seen[model_id] = key
    yield from _adapter_conflicts(gateway, seen, adapters)
    for alias, targets in gateway.aliases.items():
        if alias in seen:
            yield f"gateway.aliases.{alias}", "is the name of a model; choose another"
        for target in targets:
            if target not in seen:
                hint = did_you_mean(target, list(seen))
                yield f"gateway.aliases.{alias}", f'there is no model "{target}"{hint}'
    default = gateway.default_model
    if default is not None and default not in seen and default not in gateway.aliases:
        hint = did_you_mean(default, [*seen, *gateway.aliases])
        yield "gateway.default_model", f'there is no model or alias "{default}"{hint}'


def _adapter_conflicts(
    gateway: GatewaySettings, models: Mapping[str, str], adapters: Mapping[str, Iterable[str]]
) -> Iterator[Problem]:
    """Yield the adapters whose names mean something else. `models`: keys of models by name."""
    seen: dict[str, str] = {}
    for key, names in adapters.items():
        for name in names:
            where = f"{f'models.{key}.' if key else ''}model.adapters.{name}"
            if name in gateway.aliases:
                yield where, f"is an alias, too (gateway.aliases.{name}); choose another name"
            elif models.get(name, key) != key:
                yield where, f"is the name of a model (models.{models[name]}); choose another"
            elif name in seen:
                yield where, f"is an adapter of models.{seen[name]}, too; choose another name"
            seen[name] = key
