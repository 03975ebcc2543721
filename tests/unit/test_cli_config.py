"""`headrace config init` and `headrace config diff`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.configure.starter import FIELDS, starter
from headrace.cli.main import main
from headrace.config import load_config, preset_names
from headrace.config.load import parse_yaml


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["config", *arguments])
    return int(ended.value.code or 0)


NEEDED = {"gpu-cluster": ["gateway.host=127.0.0.1"]}
"""A site's own settings, without which a preset is refused."""


@pytest.mark.parametrize("preset", preset_names())
def test_a_starter_file_means_the_same_as_its_preset(preset: str, tmp_path: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(starter(preset))
    needed = NEEDED.get(preset, [])
    assert load_config(file, overrides=needed) == load_config(preset=preset, overrides=needed)


def test_a_preset_that_needs_more_says_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("init", str(tmp_path / "c.yaml"), "--preset", "gpu-cluster") == 0
    assert "gateway.host: listens on 0.0.0.0" in capsys.readouterr().err


def test_it_has_each_field_with_a_comment() -> None:
    text = starter("laptop")
    for name in (name for names in FIELDS.values() for name in names):
        (line,) = {line for line in text.splitlines() if line.lstrip(" #").startswith(f"{name}:")}
        assert line.startswith(("  ", "  #")) and not line.startswith("  # ")
    assert "  # Maximum length of a request in tokens" in text


def test_a_line_that_sets_nothing_can_be_switched_on() -> None:
    text = starter("laptop").replace("#nvme_folder:", "nvme_folder: /data/kv")
    assert parse_yaml(text, "text")["store"]["nvme_folder"] == "/data/kv"


def test_an_existing_file_is_replaced_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text("mine")
    assert run("init", str(file)) == 2
    assert capsys.readouterr().err == f"error: {file} exists; --force replaces it\n"
    assert file.read_text() == "mine"
    assert run("init", str(file), "--force") == 0
    assert run("check", "-f", str(file)) == 0


def test_a_dash_writes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("init", "-", "--preset", "gpu-node") == 0
    assert capsys.readouterr().out == starter("gpu-node")


def test_diff_prints_what_differs_from_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("gateway: {port: 9000}\ndecode: {engine: {max_num_seqs: 4}}\n")
    assert run("diff", "-f", str(file)) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "decode.engine.max_num_seqs: 4  (default: null)",
        "gateway.port: 9000  (default: 8000)",
    ]
    assert run("diff", "-f", str(file), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gateway.port"] == {"value": 9000, "default": 8000}


def test_diff_of_nothing_says_so_and_keys_are_masked(capsys: pytest.CaptureFixture[str]) -> None:
    run("diff")
    assert capsys.readouterr().out == "no field differs from the defaults\n"
    run("diff", "--set", "gateway.api_keys=[sk-very-secret]")
    assert "sk-very-secret" not in capsys.readouterr().out
