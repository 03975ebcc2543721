"""The names of the models' LoRA adapters. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace_engine.adapters.settings import AdapterSettings


class AdapterNames:
    """The names of LoRA adapters, and the base model of each.

    Args:
        configured: the adapters of the configuration, by the base model's name.
    """

    def __init__(self, configured: Mapping[str, AdapterSettings] | None = None) -> None:
        self._configured = dict(configured or {})
        self._added: dict[str, tuple[str, ...]] = {}

    @property
    def models(self) -> list[str]:
        """The models with adapters."""
        return list(self._configured)

    def set_added(self, model_id: str, names: Iterable[str]) -> None:
        """Set the adapters that administrators have added to a model."""
        self._added[model_id] = tuple(names)

    def named(self, model_id: str) -> list[str]:
        """Return the adapters of a model that have a name in the configuration, or were added."""
        settings = self._configured.get(model_id)
        names = () if settings is None else settings.sources
        return list(dict.fromkeys([*names, *self._added.get(model_id, ())]))

    def base(self, name: str) -> str | None:
        """Return the base model of an adapter; None if no model has one of this name.

        A name that begins with `MODEL_ID:` may be a subfolder of that model's adapters. Only its
        replicas know whether it is.
        """
        for model_id in self._configured:
            if name in self._configured[model_id].sources or name in self._added.get(model_id, ()):
                return model_id
        with_folder = [
            model_id
            for model_id, settings in self._configured.items()
            if settings.loading_path is not None and name.startswith(model_id + ":")
        ]
        return max(with_folder, key=len, default=None)
