"""`headrace calibrate reuse`, on a tiny model."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from headrace.cli.calibrate.reuse import frame, reuse
from headrace.cli.console import CliError
from tests.support.tiny import tiny_llama


def texts(folder: Path, count: int) -> Path:
    draw = random.Random(1)
    for n in range(count):
        words = (f"w{draw.randrange(500)}" for _ in range(2000))
        (folder / f"{n}.txt").write_text(" ".join(words))
    return folder


def run(folder: Path, target_kl: float, output: Path | None = None) -> None:
    model = str(tiny_llama())
    reuse(model, texts=folder, prompts=1, tokens=600, target_kl=target_kl, output=output)


def test_it_prints_the_curve_and_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts(tmp_path, 9)
    run(tmp_path, 100, tmp_path / "found.json")
    assert re.search(r"techniques\.reuse\.budget: 0\.\d\d", capsys.readouterr().out)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["budget"] == min(float(budget) for budget in found["scores"])
    assert all(len(scores) == 1 for scores in found["scores"].values())


def test_an_error_below_all_measured_has_no_budget(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"no budget up to 0\.50 keeps to a KL of 0"):
        run(texts(tmp_path, 9), 0)


def test_a_folder_with_few_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="has 3 files; give a folder with 8 or more"):
        run(texts(tmp_path, 3), 1)


def test_a_model_without_a_template_has_an_empty_frame() -> None:
    class NoTemplate:
        def apply_chat_template(self, *args: object, **kwargs: object) -> str:
            raise ValueError("no template")

    assert frame(NoTemplate()) == ("", "")


def test_the_frame_is_what_stands_around_the_users_text() -> None:
    class Template:
        def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: object) -> str:
            if messages[0]["role"] == "system":
                raise ValueError("no system role")
            return f"<s>{messages[0]['content']}</s>"

    assert frame(Template()) == ("<s>", "</s>")
