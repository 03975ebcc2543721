"""Training from scratch: equal data for all kinds, going on after a kill, models that are read."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace_lab.cross_layer.comparison import (
    Comparison,
    SettingsError,
    compare,
    read_losses,
)
from headrace_lab.cross_layer.head_loss import head_loss
from headrace_lab.cross_layer.train import Recipe, WindowOrder, begin, windows_of
from headrace_lab.models.decoder import Decoder
from headrace_lab.texts.corpus import CorpusError, learn_vocabulary, sides, stream
from tests.support.cross_layer_models import config, reference

VOCABULARY = 320
SIZES = {
    **{name: value for name, value in config("vanilla").items() if name != "kv_fusion"},
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
}
RECIPE = Recipe(tokens=8 * 2 * 16, context=16, batch=2, learning_rate=1e-2)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    draw, folder = random.Random(1), tmp_path / "texts"
    folder.mkdir()
    for n in range(8):
        words = (f"w{draw.randrange(30)}" for _ in range(400))
        (folder / f"{n}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture
def asked(texts: Path) -> Comparison:
    return Comparison(SIZES, 2, ("vanilla", "fused"), (0,), RECIPE, texts)


class Stopper:
    """Says stop after so many steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def __call__(self) -> bool:
        self._left -= 1
        return self._left <= 0


class TestTexts:
    def test_no_text_is_on_both_sides(self, texts: Path) -> None:
        train, valid = sides(texts)
        assert valid and not set(train) & set(valid)
        assert len(train) + len(valid) == 8

    def test_a_text_is_used_once(self, texts: Path) -> None:
        shutil.copy(texts / "0.txt", texts / "copy.txt")
        tokenizer, seen = learn_vocabulary([texts / "0.txt"], VOCABULARY), set[bytes]()
        once = len(tokenizer.encode((texts / "0.txt").read_text()).ids) + 1
        assert len(stream(tokenizer, [texts / "0.txt"], once, seen)) == once
        with pytest.raises(CorpusError, match="have 0 tokens, and 1 are needed"):
            stream(tokenizer, [texts / "copy.txt"], 1, seen)

    def test_any_text_can_be_encoded(self, texts: Path) -> None:
        tokenizer = learn_vocabulary([texts / "0.txt"], VOCABULARY)
        assert tokenizer.decode(tokenizer.encode("naïve 語\x00").ids) == "naïve 語\x00"


class TestOrder:
    def test_each_window_comes_once_before_any_comes_again(self) -> None:
        order = WindowOrder(7, seed=3)
        assert sorted(order.at(0, 7)) == sorted(order.at(7, 7)) == list(range(7))
        assert list(order.at(0, 7)) != list(order.at(7, 7))

    def test_it_does_not_depend_on_where_one_begins(self) -> None:
        assert list(WindowOrder(5, 0).at(3, 6)) == list(WindowOrder(5, 0).at(0, 9))[3:]

    def test_seeds_differ(self) -> None:
        assert list(WindowOrder(50, 0).at(0, 50)) != list(WindowOrder(50, 1).at(0, 50))

    def test_windows_share_the_token_between_them(self) -> None:
        found = windows_of(np.arange(9, dtype=np.uint32), 4)
        assert found.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]


def test_the_rate_rises_then_falls_to_zero() -> None:
    recipe = Recipe(tokens=100 * 32, context=16, batch=2, learning_rate=1.0)
    rates = [recipe.rate(step) for step in range(recipe.steps)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True) and 0 < rates[-1] < 0.02


def test_all_kinds_begin_with_the_same_weights_where_they_have_them() -> None:
    models = {kind: Decoder(config(kind)) for kind in ("vanilla", "fused")}
    for model in models.values():
        begin(model, seed=4)
    vanilla, fused = (model.state_dict() for model in models.values())
    common = vanilla.keys() & fused.keys()
    assert len(common) > 20 and all(torch.equal(vanilla[name], fused[name]) for name in common)
    begin(models["fused"], seed=5)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(models["fused"].state_dict()[name], vanilla[name])


def test_a_run_that_was_stopped_ends_as_one_in_one_piece(asked: Comparison, tmp_path: Path) -> None:
    whole = compare(asked, tmp_path / "whole")
    for _ in range(3):  # twice inside the first model, once inside the second
        compare(asked, tmp_path / "pieces", stop=Stopper(3))
    pieces = compare(asked, tmp_path / "pieces")
    assert list(pieces) == ["vanilla-0", "fused-0"]
    for name, losses in pieces.items():
        assert losses.final == pytest.approx(whole[name].final, abs=1e-6)
        for mine, theirs in zip(losses.train, whole[name].train, strict=True):
            assert tuple(mine) == pytest.approx(theirs, abs=1e-5)
        assert [tokens for tokens, _ in losses.valid] == list(range(32, 32 * 8 + 1, 32))


def test_what_ended_is_not_trained_again_and_more_can_be_asked_for(
    asked: Comparison, tmp_path: Path
) -> None:
    compare(asked, tmp_path / "out")
    more = Comparison(**{**vars(asked), "kinds": ("vanilla", "lite"), "seeds": (0, 1)})
    trained: list[str] = []
    compare(more, tmp_path / "out", report=lambda name, losses: trained.append(name))
    assert set(trained) == {"lite-0", "vanilla-1", "lite-1"}


def test_two_processes_share_the_runs(asked: Comparison, tmp_path: Path) -> None:
    out, trained = tmp_path / "out", list[str]()

    def other(name: str, losses: object) -> None:
        if name == "vanilla-0" and not trained:  # another call, while this one trains vanilla
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                trained.extend(pool.apply(compare, (asked, out)))

    compare(asked, out, report=other)
    assert trained == ["vanilla-0", "fused-0"]
    assert all(one.final is not None for one in read_losses(out).values())


def test_a_run_whose_losses_are_kept_is_not_trained_again(
    asked: Comparison, tmp_path: Path
) -> None:
    compare(asked, tmp_path / "out")
    kept = tmp_path / "other" / "losses"
    kept.mkdir(parents=True)
    shutil.copy(tmp_path / "out" / "losses" / "fused-0.json", kept)
    trained: list[str] = []
    both = compare(asked, kept.parent, report=lambda name, losses: trained.append(name))
    assert set(trained) == {"vanilla-0"} and set(both) == {"vanilla-0", "fused-0"}
    (asked.texts or tmp_path).joinpath("0.txt").write_text("other words " * 400)
    (tmp_path / "other" / "valid.npy").unlink()
    with pytest.raises(SettingsError, match="is of other settings or texts"):
        compare(asked, kept.parent)


class TestHeadLoss:
    @pytest.mark.parametrize("rows", [7, 256, 600])
    def test_it_is_the_cross_entropy_with_its_gradients(self, rows: int) -> None:
        torch.manual_seed(0)
        hidden = torch.randn(rows, 16, requires_grad=True)
        weight = torch.randn(50, 16, requires_grad=True)
        targets = torch.randint(50, (rows,))
        with torch.enable_grad():  # other tests of this process may have left it off
            plain = cross_entropy(hidden @ weight.T, targets)
            wanted = torch.autograd.grad(2 * plain, (hidden, weight))
            loss = head_loss(hidden, weight, targets, torch.float32)
            found = torch.autograd.grad(2 * loss, (hidden, weight))
        assert loss.item() == pytest.approx(plain.item(), abs=1e-5)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)

    def test_products_in_bfloat16_are_close(self) -> None:
        torch.manual_seed(0)
        hidden, weight = torch.randn(300, 16), torch.randn(50, 16)
        targets = torch.randint(50, (300,))
        exact = head_loss(hidden, weight, targets, torch.float32)
        assert head_loss(hidden, weight, targets, torch.bfloat16).item() == pytest.approx(
            exact.item(), abs=0.01
        )


def test_other_settings_in_the_same_folder_are_refused(asked: Comparison, tmp_path: Path) -> None:
    compare(asked, tmp_path / "out", stop=Stopper(1))
    other = Comparison(**{**vars(asked), "storage_layers": 3})
    with pytest.raises(SettingsError, match="other settings \\(storage_layers\\)"):
        compare(other, tmp_path / "out")


def test_the_model_that_is_written_has_the_loss_that_is_told(
    asked: Comparison, tmp_path: Path
) -> None:
    from headrace_lab.cross_layer.train import loss_of

    losses = compare(asked, tmp_path / "out")
    model = reference(tmp_path / "out" / "fused-0")
    windows = windows_of(np.load(tmp_path / "out" / "valid.npy"), RECIPE.context)
    assert loss_of(model, windows, 4) == pytest.approx(losses["fused-0"].final, abs=1e-4)
    assert losses["fused-0"].final < np.log(VOCABULARY) - 0.5


def test_the_command_prints_the_losses_and_plots_them(texts: Path, tmp_path: Path) -> None:
    sizes, out = tmp_path / "config.json", tmp_path / "out"
    sizes.write_text(json.dumps(SIZES))
    options = f"--texts {texts} --config {sizes} --kind fused --kind vanilla --seed 0"
    shape = "--tokens 64 --context 16 --batch 2"
    found = run(f"lab cross-layer train {out} {options} {shape}")
    assert found.exit_code == 0, found.output
    assert "fused-0, of the energy:" in found.stdout and "vanilla-0: 64 tokens" in found.stderr
    assert (out / "losses.png").stat().st_size > 1000
    assert json.loads((out / "losses" / "fused-0.json").read_text())["final"] > 0


def test_wrong_options_are_refused_with_what_is_known(texts: Path, tmp_path: Path) -> None:
    for options, message in (
        ("--kind fuzed", "vanilla, cla, yoco, lite, fused"),
        ("--tokens 100", "less than a step's 2048"),
        ("--kind cla --storage-layers 3", "takes a divisor of the 8 layers"),
        (f"--texts {texts} --seed 0", "5000001 are needed: give more texts"),
    ):
        found = run(f"lab cross-layer train {tmp_path / 'out'} {options}")
        assert message in str(found.exception), found.output


def run(arguments: str) -> Result:
    return CliRunner().invoke(app, arguments.split())
