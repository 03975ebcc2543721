"""The classes that run extensions, over a scheduler and a worker that only say what they do."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.extensions import extension, scheduler, worker
from headrace_engine.extensions.extension import (
    OURS,
    SchedulerPart,
    WorkerPart,
    installed_extensions,
    metadata_of,
    overridden,
)
from headrace_engine.extensions.scheduler import SchedulerWithExtensions, why_no_extensions
from headrace_engine.extensions.worker import WorkerWithExtensions
from headrace_engine.vllm.scheduling import RequestStatus

NAMES = [
    "AttentionExtension",
    "BlendingExtension",
    "GrammarExtension",
    "ResumeExtension",
    "SpeculativeExtension",
]


class Vllms:
    """Stands for vLLM's scheduler and for its worker."""

    log_stats = False

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def add_request(self, request: Any) -> None:
        self.log.append(f"vLLM adds {request}")

    def schedule(self) -> Any:
        self.log.append("vLLM schedules")
        return SimpleNamespace()

    def update_from_output(self, step: Any, output: Any) -> str:
        self.log.append("vLLM updates")
        return "outputs"

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        return bool(request.ready)

    def load_model(self) -> None:
        self.log.append("vLLM loads")

    def determine_available_memory(self) -> int:
        return 100

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return {"layer": "vLLM's"}

    def initialize_from_config(self, config: Any) -> None:
        self.log.append("vLLM makes the cache")

    def execute_model(self, step: Any) -> Any:
        self.log.append(f"vLLM runs {step}")
        if step == "a bad step":
            raise ValueError(step)
        return "output"

    def sample_tokens(self) -> Any:
        return "sampled"


class Scheduling(SchedulerPart):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def before_add(self, request: Any) -> None:
        self.log.append(f"{self.name} sees {request}")

    def after_add(self, request: Any) -> None:
        self.log.append(f"{self.name} saw {request}")

    def on_grammar_compiled(self, request: Any) -> None:
        self.log.append(f"{self.name} leads the grammar")

    def before_schedule(self) -> None:
        self.log.append(f"{self.name} before")

    def after_schedule(self, step: Any, metadata: dict[str, Any]) -> None:
        self.log.append(f"{self.name} after")
        metadata[self.name] = len(metadata)

    def before_update(self, step: Any, output: Any) -> None:
        self.log.append(f"{self.name} reads {output}")

    def after_update(self) -> None:
        self.log.append(f"{self.name} updated")


class Work(WorkerPart):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.commands = {name: lambda command: {"by": name, **command}}

    def before_load(self) -> None:
        self.log.append(f"{self.name} before")

    def after_load(self) -> None:
        self.log.append(f"{self.name} after")

    def kv_cache_bytes(self, available: int, specs: Any) -> int:
        return available - 10 * len(specs)

    def kv_cache_specs(self, specs: dict[str, Any]) -> dict[str, Any]:
        return {name: f"{self.name} of {spec}" for name, spec in specs.items()}

    def after_kv_cache(self, kv_cache_config: Any) -> None:
        self.log.append(f"{self.name} has the cache")

    def unsupported(self) -> dict[str, str]:
        return {self.name: "why not"}

    def begin_step(self, step: Any) -> None:
        self.log.append(f"{self.name} begins {step}")

    def transform_step(self, step: Any) -> Any:
        return f"{step} of {self.name}"

    def end_step(self) -> None:
        self.log.append(f"{self.name} ends")

    def after_step(self, output: Any) -> Any:
        return f"{output} by {self.name}"

    def after_sample(self, output: Any) -> Any:
        return f"{output} by {self.name}"


class Extension:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def scheduler(self, scheduler: Any) -> Sequence[SchedulerPart]:
        return [Scheduling(self.name, self.log)]

    def worker(self, worker: Any) -> WorkerPart | None:
        return Work(self.name, self.log)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in an engine with the extensions a and b."""
    happened: list[str] = []
    made = [Extension(name, happened) for name in "ab"]
    for module in (scheduler, worker):
        monkeypatch.setattr(module, "installed_extensions", lambda: made)
    return happened


class ExtendedScheduler(SchedulerWithExtensions, Vllms): ...


class ExtendedWorker(WorkerWithExtensions, Vllms): ...


def entries(*names: str) -> Any:
    return [SimpleNamespace(name=name, load=lambda name=name: lambda: name) for name in names]


def test_the_extensions_of_the_app_are_installed() -> None:
    assert [type(each).__name__ for each in installed_extensions()][: len(NAMES)] == NAMES


def test_ours_come_first_in_their_order_whatever_else_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = entries("zulu", "alpha", *reversed(OURS))
    monkeypatch.setattr(extension, "entry_points", lambda group: found)
    assert installed_extensions() == [*OURS, "alpha", "zulu"]


def test_an_installation_without_one_of_ours_starts_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without `attention` approximate KV would be shared; without `resume` streams begin anew."""
    monkeypatch.setattr(extension, "entry_points", lambda group: entries(*OURS[1:]))
    with pytest.raises(RuntimeError, match="lacks the engine extensions attention; install"):
        installed_extensions()


def test_a_request_meets_each_extension_before_and_after_vllm(log: list[str]) -> None:
    ExtendedScheduler(log).add_request("r")
    assert log == ["a sees r", "b sees r", "vLLM adds r", "b saw r", "a saw r"]


def test_a_step_is_prepared_in_order_and_told_in_the_reverse(log: list[str]) -> None:
    step = ExtendedScheduler(log).schedule()
    assert log == ["a before", "b before", "vLLM schedules", "b after", "a after"]
    assert (metadata_of(step, "b"), metadata_of(step, "a"), metadata_of(step, "c")) == (0, 1, None)


def test_an_output_is_read_before_vllm_processes_it(log: list[str]) -> None:
    assert ExtendedScheduler(log).update_from_output("step", "output") == "outputs"
    assert log == ["a reads output", "b reads output", "vLLM updates", "b updated", "a updated"]


@pytest.mark.parametrize(("waits", "ready"), [(True, True), (True, False), (False, True)])
def test_extensions_hear_of_a_grammar_once_it_is_compiled(
    waits: bool, ready: bool, log: list[str]
) -> None:
    waiting = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request = SimpleNamespace(ready=ready, status=waiting if waits else RequestStatus.WAITING)
    assert ExtendedScheduler(log)._handle_blocked_waiting_request(request) == ready
    assert log == (["a leads the grammar", "b leads the grammar"] if waits and ready else [])


def test_a_scheduler_gives_its_parts_by_class(log: list[str]) -> None:
    made = ExtendedScheduler(log)
    assert made.part(Scheduling) is made.parts[0] and made.part(SchedulerPart) is made.parts[0]
    assert made.part(type("Other", (SchedulerPart,), {})) is None


def loaded(log: list[str]) -> ExtendedWorker:
    made = ExtendedWorker(log)
    made.load_model()
    return made


def test_a_worker_asks_extensions_around_the_load_and_for_the_cache(log: list[str]) -> None:
    made = loaded(log)
    assert log == ["a before", "b before", "vLLM loads", "b after", "a after"]
    assert made.determine_available_memory() == 80
    assert made.get_kv_cache_spec() == {"layer": "b of a of vLLM's"}
    log.clear()
    made.initialize_from_config(None)
    assert log == ["vLLM makes the cache", "b has the cache", "a has the cache"]
    assert made.headrace_unsupported() == {"a": "why not", "b": "why not"}


def test_a_step_begins_for_all_before_one_changes_it(log: list[str]) -> None:
    made = loaded(log)
    log.clear()
    assert made.execute_model("step") == "output by b by a"
    assert log == ["a begins step", "b begins step", "vLLM runs step of a of b", "b ends", "a ends"]
    assert made.sample_tokens() == "sampled by b by a"


def test_a_step_that_fails_ends_for_the_extensions(log: list[str]) -> None:
    made = loaded(log)
    made.set_parts([Plain()])
    log.clear()
    with pytest.raises(ValueError, match="a bad step"):
        made.execute_model("a bad step")
    assert made.parts[0].ended  # type: ignore[attr-defined]


class Plain(WorkerPart):
    ended = False

    def end_step(self) -> None:
        self.ended = True


def test_a_command_reaches_the_extension_that_has_it(log: list[str]) -> None:
    made = loaded(log)
    assert made.headrace_command("b", {"x": 1}) == {"by": "b", "x": 1}
    assert made.headrace_command("c", {"x": 1}) == {}


def test_what_no_extension_defines_is_not_called(log: list[str]) -> None:
    parts = [Plain(), WorkerPart()]
    methods = WorkerPart.end_step, WorkerPart.begin_step
    assert [len(overridden(parts, method)) for method in methods] == [1, 0]
    made = ExtendedWorker(log)
    assert made.execute_model("step") == "output" and made.sample_tokens() == "sampled"


def test_another_scheduler_class_is_named() -> None:
    def config(cls: type) -> Any:
        return SimpleNamespace(scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: cls))

    assert why_no_extensions(config(ExtendedScheduler)) is None
    assert (
        why_no_extensions(config(Vllms)) == f"the engine runs with scheduler_cls {__name__}.Vllms"
    )
