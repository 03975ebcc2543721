"""An extension of vLLM's engine, and its parts in the processes of an engine.

An extension is an object behind an entry point of the group `headrace.engine_extensions`; vLLM's
own word is plugin. The scheduler and the workers of an engine ask every installed extension for its
part (`scheduler`, `worker`). An extension reads the engine's configuration to decide whether it has
one. `OURS` has Headrace's own.

A part defines the methods that it needs. Methods that no part defines cost nothing in a step.
Parts run in the order of `installed_extensions`; methods named `after_...`, and `end_step`, in the
reverse order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

GROUP = "headrace.engine_extensions"
OURS = ("attention", "blending", "grammars", "resume", "speculation")
"""Names of Headrace's own extensions, in their order. `attention` precedes `resume`: the blocks of
a sparse answer must be private before a resumed request gets the tokens of its earlier answer."""
METADATA = "headrace_metadata"
"""Attribute of a step's `SchedulerOutput`: messages of the scheduler's parts, by key, to the
workers' parts, and to themselves for when the step's output arrives."""

EXTENSIBLE_WORKER = "headrace_engine.extensions.worker.ExtensibleWorker"
EXTENSIBLE_SCHEDULERS = {
    False: "headrace_engine.extensions.scheduler.ExtensibleScheduler",
    True: "headrace_engine.extensions.scheduler.AsyncExtensibleScheduler",
}
"""Path of the scheduler class, by whether the engine schedules steps ahead."""

Command = Callable[[Mapping[str, Any]], dict[str, Any]]


class SchedulerPart:
    """Part of an extension in the process that schedules an engine's steps."""

    def before_add(self, request: Any) -> None:
        """Prepare a request that vLLM is about to add."""

    def after_add(self, request: Any) -> None:
        """Run after vLLM has added a request."""

    def on_grammar_compiled(self, request: Any) -> None:
        """Prepare a request that waited for its grammar, before its first step."""

    def before_schedule(self) -> None:
        """Prepare the next step, before vLLM schedules it."""

    def after_schedule(self, step: Any, metadata: dict[str, Any]) -> None:
        """Add what the workers must know about a scheduled step.

        Args:
            step: vLLM's `SchedulerOutput`. metadata: by key, for `METADATA`.
        """

    def before_update(self, step: Any, output: Any) -> None:
        """Read a step's output before vLLM processes it.

        Args:
            step: vLLM's `SchedulerOutput`. output: vLLM's `ModelRunnerOutput`.
        """

    def after_update(self) -> None:
        """Run after vLLM has processed a step's output."""


class WorkerPart:
    """Part of an extension in a worker process."""

    commands: Mapping[str, Command] = {}
    """Functions for `ExtensibleWorker.headrace_command`, by name."""

    def before_load(self) -> None:
        """Prepare the engine, before vLLM loads the model."""

    def after_load(self) -> None:
        """Run after vLLM has loaded the model."""

    def kv_cache_bytes(self, available: int, specs: Mapping[str, Any]) -> int:
        """Return the bytes for the KV cache, of those that are available.

        Args:
            specs: vLLM's specs of the cache, by attention layer.
        """
        return available

    def kv_cache_specs(self, specs: dict[str, Any]) -> dict[str, Any]:
        """Return the specs of the KV cache, by attention layer, made from vLLM's."""
        return specs

    def after_kv_cache(self, kv_cache_config: Any) -> None:
        """Run after vLLM has made the KV cache."""

    def unsupported(self) -> dict[str, str]:
        """Return the techniques that the engine is configured for and cannot do, by name, with the
        reasons."""
        return {}

    def begin_step(self, step: Any) -> None:
        """Prepare a step, before the model runs.

        Args:
            step: vLLM's `SchedulerOutput`.
        """

    def transform_step(self, step: Any) -> Any:
        """Return the step as vLLM's model runner gets it. Runs after `begin_step` of all parts."""
        return step

    def end_step(self) -> None:
        """Run at the end of the step, even if it raised an error."""

    def after_step(self, output: Any) -> Any:
        """Return a step's output, made from vLLM's."""
        return output

    def after_sample(self, output: Any) -> Any:
        """Return the output of a step whose tokens were sampled later, made from vLLM's."""
        return output


class EngineExtension(Protocol):
    """An extension of engines.

    Its methods, not its module, import vLLM and torch, so that engines that do not use it start as
    fast as without it.
    """

    def scheduler(self, scheduler: Any) -> Sequence[SchedulerPart]:
        """Return its parts in an engine's scheduler; none if the engine does not use it."""

    def worker(self, worker: Any) -> WorkerPart | None:
        """Return its part in a worker, whose device is ready and whose model is not loaded; None
        if the engine does not use it."""


def installed_extensions() -> list[EngineExtension]:
    """Return the installed extensions: `OURS`, then others in the order of their names.

    Raises:
        RuntimeError: one of `OURS` is not installed. An engine without it would answer wrongly.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    missing = [name for name in OURS if name not in found]
    if missing:
        raise RuntimeError(
            f"the installed package lacks the engine extensions {', '.join(missing)}; install "
            "headrace again"
        )
    others = sorted(found.keys() - {*OURS})
    return [found[name].load()() for name in (*OURS, *others)]


def overridden(parts: Sequence[Any], method: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return a method of `SchedulerPart` or `WorkerPart`, bound to each part that overrides it."""
    name = method.__name__
    return [getattr(part, name) for part in parts if getattr(type(part), name) is not method]


def metadata_of(step: Any, key: str) -> Any:
    """Return the metadata of a step under a key; None if there is none."""
    return getattr(step, METADATA, {}).get(key)
