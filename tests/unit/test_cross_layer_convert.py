"""Conversion of a model to one that keeps less KV, on models small enough to check."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from headrace.cli.console import CliError
from headrace.cli.main import app
from headrace_lab.cli.cross_layer.convert import ConvertOptions, convert
from headrace_lab.cross_layer.asymmetry import learned, nearest
from headrace_lab.cross_layer.convert import Converter
from headrace_lab.cross_layer.distill import distill
from headrace_lab.cross_layer.error import Truth
from headrace_lab.models import checkpoint
from headrace_lab.models.decoder import Decoder
from headrace_prefill.cross_layer.config import CrossLayerConfig, CrossLayerConfigError
from tests.support.cross_layer_models import VOCABULARY, config, write_model
from tests.support.tiny import tiny_llama

SOURCES = {"k_proj": 1, "v_proj": 0}
"""In the model `shared`, layer 4 has the keys of layer 1 and the values of layer 0."""


def tokens(texts: int, seed: int) -> Tensor:
    own = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (texts, 48), generator=own)


def plain(layers: int = 6) -> dict[str, Any]:
    return {**config("vanilla"), "num_hidden_layers": layers, "kv_fusion": {"kind": "vanilla"}}


@pytest.fixture(scope="module")
def model() -> Decoder:
    """Random weights; layer 4 could read K of layer 1, turned, and V of layer 0, mapped."""
    torch.manual_seed(0)
    made = Decoder(plain())
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, 0.0, weight.shape[1] ** -0.5)
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(1e-3)  # so layers see nearly the same hidden states
        layers = made.model.layers
        layers[4].self_attn.k_proj.weight.copy_(layers[1].self_attn.k_proj.weight)
        layers[4].self_attn.v_proj.weight.copy_(-2 * layers[0].self_attn.v_proj.weight)
    return made


@pytest.fixture(scope="module")
def converter(model: Decoder) -> Converter:
    return Converter(plain(), model, tokens(42, 1))


@pytest.fixture(scope="module")
def truth(model: Decoder) -> Truth:
    return Truth(model, tokens(2, 2))


def test_a_model_is_the_same_as_itself(model: Decoder, truth: Truth) -> None:
    error = truth.error(model)
    assert error.perplexity == pytest.approx(1.0, abs=1e-5)
    assert error.kl == pytest.approx(0.0, abs=1e-6)


def test_an_error_does_not_depend_on_the_layers_below_that_are_not_computed(
    converter: Converter, truth: Truth
) -> None:
    made = converter.convert(converter.cross_layer("lite", [3, 5]))
    whole, part = truth.error(made), truth.error(made, first=3)
    assert part.kl == pytest.approx(whole.kl, rel=1e-3)
    assert part.perplexity == pytest.approx(whole.perplexity, rel=1e-4)


def test_a_reader_reads_the_layers_that_have_its_keys_and_values(converter: Converter) -> None:
    assert converter.cross_layer("lite", [4]).readers == {4: (1, 0)}
    assert converter.cross_layer("fused", [4]).readers == {4: (0, 1)}


def test_readers_do_not_read_readers(converter: Converter) -> None:
    cross_layer = converter.cross_layer("lite", [2, 3, 4, 5])
    assert all(set(pair) <= {0, 1} for pair in cross_layer.readers.values())


def test_a_layer_whose_kv_another_has_is_converted_first_and_costs_nothing(
    converter: Converter, truth: Truth
) -> None:
    points = list(converter.curve("lite", truth, most=3))
    assert points[0].layer == 4 and points[0].error.kl < 1e-6
    assert [len(point.cross_layer.readers) for point in points] == [1, 2, 3]
    assert points[1].error.kl > 10 * points[0].error.kl
    assert points[2].saved == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["fused", "lite"])
def test_the_fit_is_better_than_reading_the_same_layers_without_it(
    kind: Any, model: Decoder, converter: Converter, truth: Truth
) -> None:
    cross_layer = converter.cross_layer(kind, [4])
    raw = bare(model, converter.described(cross_layer))
    assert truth.error(converter.convert(cross_layer)).kl < 0.1 * truth.error(raw).kl


def test_distillation_lowers_the_error_and_leaves_storage_layers_alone() -> None:
    exact, own = Decoder(plain(4)), torch.Generator().manual_seed(0)
    for weight in exact.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, 0.0, weight.shape[1] ** -0.5, own)
    readers = {"kind": "fused", "storage_layers": 3, "readers": {"2": [0, 1]}}
    made, truth = bare(exact, {**plain(4), "kv_fusion": readers}), Truth(exact, tokens(2, 2))
    before, kept = truth.error(made), made.model.layers[3].mlp.up_proj.weight.clone()
    losses: list[float] = []
    distill(made, exact, list(tokens(2, 2)) * 10, lambda step, loss: losses.append(loss))
    assert len(losses) == 20 and truth.error(made).kl < 0.8 * before.kl
    assert torch.equal(made.model.layers[3].mlp.up_proj.weight, kept)


def bare(model: Decoder, described: dict[str, Any]) -> Decoder:
    """A model of another kind with the same weights, where it has them."""
    made = Decoder(described)
    kept = made.state_dict().keys()
    made.load_state_dict({n: w for n, w in model.state_dict().items() if n in kept}, strict=False)
    return made


class TestAsymmetry:
    def test_the_nearest_layers_are_those_that_have_the_keys_and_the_values(
        self, converter: Converter
    ) -> None:
        found = {one.layer: one for one in nearest(converter.sums)}
        assert sorted(found) == [3, 4, 5]
        assert (found[4].keys, found[4].values) == (1, 0)
        assert found[4].key_error < 0.01 < found[4].first_key_error
        assert found[4].value_error == found[4].first_value_error < 0.01

    def test_what_a_trained_mixture_draws_from_the_lower_layer_is_told(self) -> None:
        made = Decoder(config("fused"))
        mixture = made.model.layers[3].self_attn.mix
        with torch.no_grad():
            mixture.first_keys.zero_()
            mixture.last_values.zero_()
        found = learned(made, tokens(1, 4))
        assert found[3] == pytest.approx((0.0, 1.0))
        assert 0 < found[4][0] < 1


class TestCommand:
    def asked(self, texts: Path, **options: Any) -> ConvertOptions:
        usual = {"kind": "fused", "perplexity": 0.05, "readers": None, "distill": 0}
        sizes = {"texts": texts, "fit": 5, "measure": 1, "tokens": 48}
        return ConvertOptions(**{**usual, **sizes, **options})

    def test_it_writes_the_largest_model_within_the_limit_and_says_what_it_saves(
        self, source: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        convert(str(source), tmp_path / "out", self.asked(texts, perplexity=100.0))
        described, _ = checkpoint.read(tmp_path / "out")
        assert sorted(CrossLayerConfig.of(described).readers) == [2, 3]
        assert (tmp_path / "out" / "tokenizer.json").exists()
        assert (tmp_path / "out" / "report.png").stat().st_size > 1000
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["written"] == 2 and [p["kv_saved"] for p in report["curve"]] == [0.25, 0.5]
        assert report["curve"][1]["kv_fusion"] == described["kv_fusion"]
        assert {one["layer"] for one in report["nearest"]} == {2, 3}
        assert "2 of 4 layers keep no KV, 50.0% of it is saved" in capsys.readouterr().out

    def test_no_model_is_written_if_one_layer_is_too_much(
        self, source: Path, texts: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(CliError, match="allow more with --perplexity"):
            convert(str(source), tmp_path / "out", self.asked(texts, perplexity=-0.99))
        assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
            "report.json",
            "report.png",
        ]

    def test_so_many_readers_as_asked_for_are_made_and_distilled(
        self, source: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        asked = self.asked(texts, kind="lite", readers=1, perplexity=0.0, distill=2)
        convert(str(source), tmp_path / "out", asked)
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["written"] == 1 and report["distilled"]["kl"] > 0
        assert "distilled" in capsys.readouterr().out

    def test_wrong_options_and_too_few_texts_are_refused(
        self, source: Path, texts: Path, tmp_path: Path
    ) -> None:
        for options, message in (
            (f"--kind yoco --texts {texts}", "--kind is yoco: write fused or lite"),
            (f"--texts {texts} --fit 500", "and 500 are needed: give more texts"),
        ):
            found = CliRunner().invoke(
                app, f"lab cross-layer convert {source} {tmp_path / 'out'} {options}".split()
            )
            assert message in str(found.exception), found.output


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(1)
    for n in range(8):
        lines = (" ".join(f"w{draw.randrange(90)}" for _ in range(9)) for _ in range(40))
        (folder / f"{n}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama of four layers with a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "source"
    tiny = tiny_llama()
    words = json.loads((tiny / "config.json").read_text())["vocab_size"]
    write_model(folder, {**plain(4), "architectures": ["LlamaForCausalLM"], "vocab_size": words})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny / name, folder / name)
    return folder


class TestFolders:
    def test_a_folder_brings_back_what_was_written(
        self, tmp_path: Path, converter: Converter
    ) -> None:
        cross_layer = converter.cross_layer("fused", [3])
        made = converter.convert(cross_layer)
        checkpoint.write(tmp_path / "out", converter.described(cross_layer), made)
        described, again = checkpoint.read(tmp_path / "out")
        assert CrossLayerConfig.of(described) == cross_layer
        torch.testing.assert_close(again(tokens(1, 5)), made(tokens(1, 5)))

    def test_weights_that_do_not_fit_are_refused(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "model", config("yoco"))
        (folder / "config.json").write_text(json.dumps(config("vanilla")))
        with pytest.raises(CrossLayerConfigError, match=r"do not fit config\.json"):
            checkpoint.read(folder)

    def test_a_model_that_shares_kv_already_is_refused(self) -> None:
        with pytest.raises(CrossLayerConfigError, match="only a Llama whose layers all keep KV"):
            Converter(config("lite"), Decoder(config("lite")), tokens(3, 1))
