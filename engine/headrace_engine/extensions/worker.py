"""vLLM's worker of this platform, with the parts of the installed extensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace_engine.extensions.extension import WorkerPart, installed_extensions, overridden
from headrace_engine.vllm.worker import PlatformWorker

Hooks = Sequence[Callable[..., Any]]


class WorkerWithExtensions:
    """Mixin that precedes a worker class of vLLM among the bases.

    Attributes:
        parts: the parts of the extensions that the engine uses, once the model is being loaded.
    """

    parts: Sequence[WorkerPart] = ()
    _begin_step: Hooks = ()
    _transform_step: Hooks = ()
    _end_step: Hooks = ()
    _after_step: Hooks = ()
    _after_sample: Hooks = ()

    def load_model(self, **kwargs: Any) -> None:
        """Load the model like vLLM, with the extensions around it."""
        made = [each.worker(self) for each in installed_extensions()]
        self.set_parts([part for part in made if part is not None])
        for each in overridden(self.parts, WorkerPart.before_load):
            each()
        super().load_model(**kwargs)  # type: ignore[misc]
        for each in overridden(self.parts[::-1], WorkerPart.after_load):
            each()

    def set_parts(self, parts: Sequence[WorkerPart]) -> None:
        """Have a worker run these parts."""
        self.parts = parts
        self._begin_step = overridden(parts, WorkerPart.begin_step)
        self._transform_step = overridden(parts, WorkerPart.transform_step)
        self._end_step = overridden(parts[::-1], WorkerPart.end_step)
        self._after_step = overridden(parts[::-1], WorkerPart.after_step)
        self._after_sample = overridden(parts[::-1], WorkerPart.after_sample)

    def determine_available_memory(self) -> int:
        """Return the bytes for the KV cache like vLLM, less those that extensions take."""
        available: int = super().determine_available_memory()  # type: ignore[misc]
        for each in overridden(self.parts, WorkerPart.kv_cache_bytes):
            available = each(available, super().get_kv_cache_spec())  # type: ignore[misc]
        return available

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return vLLM's specs of the KV cache, as extensions change them."""
        specs: dict[str, Any] = super().get_kv_cache_spec()  # type: ignore[misc]
        for each in overridden(self.parts, WorkerPart.kv_cache_specs):
            specs = each(specs)
        return specs

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the KV cache like vLLM, and tell the extensions."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        for each in overridden(self.parts[::-1], WorkerPart.after_kv_cache):
            each(kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step like vLLM, with the extensions around it."""
        try:
            for each in self._begin_step:
                each(scheduler_output)
            for each in self._transform_step:
                scheduler_output = each(scheduler_output)
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
        finally:
            for each in self._end_step:
                each()
        for each in self._after_step:
            output = each(output)
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample a step's tokens like vLLM, and return the output as extensions change it."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        for each in self._after_sample:
            output = each(output)
        return output

    def headrace_unsupported(self) -> dict[str, str]:
        """Return the techniques that this engine cannot do, by name, with the reasons."""
        return {name: why for part in self.parts for name, why in part.unsupported().items()}

    def headrace_command(self, name: str, command: Mapping[str, Any]) -> dict[str, Any]:
        """Run the function of an extension that has this name, for `collective_rpc`; return {} if
        no extension has it."""
        for part in self.parts:
            if (function := part.commands.get(name)) is not None:
                return function(command)
        return {}


class ExtensibleWorker(WorkerWithExtensions, PlatformWorker):  # type: ignore[misc]
    """vLLM's worker for the platform, with extensions."""
