"""vLLM's schedulers, with the parts of the installed extensions."""

from __future__ import annotations

from typing import Any, TypeVar

from headrace_engine.extensions.extension import (
    METADATA,
    SchedulerPart,
    installed_extensions,
    overridden,
)
from headrace_engine.usage.scheduler_usage import SchedulerUsage, UsageUpdate
from headrace_engine.vllm.resumed_requests import GrammarWatch
from headrace_engine.vllm.scheduling import AsyncScheduler, Scheduler
from headrace_engine.vllm.usage_stats import UsageWatch, is_usage_asked_for

Part = TypeVar("Part", bound=SchedulerPart)


class SchedulerWithExtensions(GrammarWatch, UsageWatch):
    """Mixin that precedes a scheduler of vLLM among the bases.

    Attributes:
        parts: the parts of the extensions that the engine uses.
        usage: the cost of each request; empty unless the frontend has asked for it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts = [part for each in installed_extensions() for part in each.scheduler(self)]
        self.usage = SchedulerUsage(self, is_on=is_usage_asked_for())
        before, after = self.parts, self.parts[::-1]
        self._before_add = overridden(before, SchedulerPart.before_add)
        self._after_add = overridden(after, SchedulerPart.after_add)
        self._on_grammar_compiled = overridden(before, SchedulerPart.on_grammar_compiled)
        self._before_schedule = overridden(before, SchedulerPart.before_schedule)
        self._after_schedule = overridden(after, SchedulerPart.after_schedule)
        self._before_update = overridden(before, SchedulerPart.before_update)
        self._after_update = overridden(after, SchedulerPart.after_update)

    def part(self, kind: type[Part]) -> Part | None:
        """Return the part of a class; None if there is none."""
        return next((each for each in self.parts if isinstance(each, kind)), None)

    def add_request(self, request: Any) -> None:
        """Add a request like vLLM, with what the extensions do to it."""
        for each in self._before_add:
            each(request)
        super().add_request(request)  # type: ignore[misc]
        self.usage.after_add(request)
        for each in self._after_add:
            each(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step like vLLM, with what the extensions tell the workers about it."""
        for each in self._before_schedule:
            each()
        step = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.usage.after_schedule(step)
        if self._after_schedule:
            metadata: dict[str, Any] = {}
            for each in self._after_schedule:
                each(step, metadata)
            setattr(step, METADATA, metadata)
        return step

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Process a step's output like vLLM, with what the extensions read in it."""
        self.usage.before_update(scheduler_output, model_runner_output)
        for each in self._before_update:
            each(scheduler_output, model_runner_output)
        found = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output, *args, **kwargs
        )
        for each in self._after_update:
            each()
        return found

    def on_request_end(self, request_id: str) -> None:
        """Implement `UsageWatch.on_request_end`."""
        self.usage.on_end(request_id)

    def take_usage(self) -> UsageUpdate:
        """Implement `UsageWatch.take_usage`."""
        return self.usage.take_update()

    def on_grammar_compiled(self, request: Any) -> None:
        """Implement `GrammarWatch.on_grammar_compiled`."""
        for each in self._on_grammar_compiled:
            each(request)


class ExtensibleScheduler(SchedulerWithExtensions, Scheduler):  # type: ignore[misc]
    """Scheduler for engines in which a step waits for the one before."""


class AsyncExtensibleScheduler(SchedulerWithExtensions, AsyncScheduler):  # type: ignore[misc]
    """Scheduler for engines that schedule steps ahead."""


def why_no_extensions(config: Any) -> str | None:
    """Return why an engine's scheduler runs no extensions; None if it runs them.

    Args:
        config: vLLM's configuration of the engine.
    """
    scheduler = config.scheduler_config.get_scheduler_cls()
    if isinstance(scheduler, type) and issubclass(scheduler, SchedulerWithExtensions):
        return None
    return f"the engine runs with scheduler_cls {scheduler.__module__}.{scheduler.__qualname__}"
