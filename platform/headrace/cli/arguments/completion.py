"""Completes the values of options on the command line. None of these may be slow or fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import BaseModel


def _starting(begin: str, words: Iterable[str]) -> list[str]:
    return sorted(word for word in words if word.startswith(begin))


def presets(incomplete: str) -> list[str]:
    """Return the presets."""
    from headrace.config import preset_names

    return _starting(incomplete, preset_names())


def instances(incomplete: str) -> list[str]:
    """Return the names of this machine's instances."""
    from headrace.cli import state

    return _starting(incomplete, (one.name for one in state.instances()))


def models(incomplete: str) -> list[str]:
    """Return the models that Headrace knows by name."""
    from headrace.model.registry import REGISTRY

    return _starting(incomplete, REGISTRY)


def fields(incomplete: str) -> list[str]:
    """Return the fields of the configuration, as `--set` takes them."""
    from headrace.config import HeadraceConfig

    return _starting(incomplete, _fields(HeadraceConfig))


def _fields(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = next(
            (
                each
                for each in (field.annotation, *getattr(field.annotation, "__args__", ()))
                if isinstance(each, type) and issubclass(each, BaseModel)
            ),
            None,
        )
        if section is None:
            yield f"{path}{name}="
        else:
            yield from _fields(section, f"{path}{name}.")
