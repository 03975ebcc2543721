"""Commands on a configuration with several models."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli import up
from headrace.cli.console import CliError, stderr
from headrace.cli.display import Display
from headrace.cli.doctor import machine
from headrace.cli.doctor.command import doctor
from headrace.cli.show import ready
from headrace.cli.show.requests import request_table
from headrace.cli.state import Instance
from headrace.config import HeadraceConfig
from headrace.config.load import validate

INSTANCE = Instance("default", "t", endpoint="http://x", model="gpt", models=["a", "b"])


TWO = {"a": None, "b": {"decode": {"replicas": 3}}}


def config(**data: Any) -> HeadraceConfig:
    return validate({"models": TWO, **data}, files_here=False)


def test_up_says_first_which_engines_of_which_model_will_start() -> None:
    assert up._preview(config()) == [
        "starting vLLM engines of a on this machine: 1 prefill, 1 decode",
        "starting vLLM engines of b on this machine: 1 prefill, 3 decode",
    ]


def test_commands_use_the_default_model_or_the_first() -> None:
    assert up._default_model(config()) == "a"
    assert up._default_model(config(gateway={"default_model": "b"})) == "b"


def test_the_fork_server_has_the_variables_that_all_engines_have() -> None:
    shared = up._environment_of_imports(config())
    assert shared["TORCH_COMPILE_DISABLE"] == "1"
    models = {"a": None, "b": {"decode": {"env": {"TORCH_COMPILE_DISABLE": "0"}}}}
    assert "TORCH_COMPILE_DISABLE" not in up._environment_of_imports(config(models=models))


def test_up_gets_the_files_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.model.resolve", lambda source, progress: f"/cache/{source}")
    monkeypatch.setattr("headrace.config.check", lambda config: [])
    with Display(stderr()) as display:
        found = up._with_models(config(), display)
    sources = {key: one.model.source for key, one in found.served_models().items()}
    assert sources == {"a": "/cache/a", "b": "/cache/b"}


def test_the_last_lines_of_up_name_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    ready.announce(INSTANCE, 3.0, detach=True)
    shown = capsys.readouterr().out
    assert "models     a, b" in shown and '"model": "gpt"' in shown
    assert ready.addresses(INSTANCE, 3.0)["models"] == ["a", "b"]


def test_doctor_counts_the_engines_of_all_models() -> None:
    others = {"store": {"enabled": False}}
    six, two = config(**others), config(models={}, **others)
    needed = [machine.needed_memory_bytes(each) - machine.CONTROL_BYTES for each in (six, two)]
    assert needed[0] == 3 * needed[1]  # six engines, and two
    models = {"a": {"model": {"source": "/a"}}, "b": None}
    assert machine.models_by_name(config(models=models)) == ["b"]


def test_doctor_checks_a_pod_of_a_model_that_there_is() -> None:
    with pytest.raises(CliError, match="--model needs --cluster"):
        doctor(cluster=False, model="a")


def test_requests_show_their_model_if_there_are_several() -> None:
    def table(*models: str) -> list[str]:
        shared = {
            "path": "/v1/completions",
            "at": 0.0,
            "status": 200,
            "ttft_s": 0.1,
            "total_s": 0.2,
        }
        shared |= {"tokens": 1, "replica": "r", "error": None}
        rows = [{"id": str(n), "model": model, **shared} for n, model in enumerate(models)]
        return [str(column.header) for column in request_table(rows, 1.0, 200).columns]

    assert "model" in table("a", "b") and "model" not in table("a", "a", "")
