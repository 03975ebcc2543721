"""Training of several kinds of models on equal tokens, in a folder from which it can be resumed.

    settings.json           settings of the runs; another call must ask for the same
    tokenizer.json          learned from the training texts
    train.npy, valid.npy
    losses/KIND-SEED.json   of each run so far
    losses.png
    KIND-SEED/              a run: its checkpoint, then config.json, weights and tokenizer for vLLM

All kinds are trained with one seed before the next seed begins. Several processes may work in one
folder: each takes runs that no other process has. A run whose file of losses says that it ended is
not trained again, even if only that file is left.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from headrace_lab.cross_layer.train import STATE, Losses, Recipe, Run, windows_of
from headrace_lab.models.checkpoint import write
from headrace_lab.texts.corpus import END, Tokens, learn_vocabulary, sides, stream
from headrace_prefill.cross_layer.config import KINDS, Kind

SETTINGS, LOSSES, PLOT = "settings.json", "losses", "losses.png"
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 6144,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""A model of 5.0 to 5.3 million parameters. A core trains it on 5 million tokens in about half an
hour, in bfloat16."""


class SettingsError(ValueError):
    """The folder holds runs with other settings; the message says which differ."""


@dataclass(frozen=True)
class Comparison:
    """Settings of the runs that are compared.

    Attributes:
        config: the models' config.json, without `kv_fusion` and `architectures`.
        storage_layers: number of storage layers of all kinds except vanilla.
        texts: a folder of texts; None for those of the installed packages.
    """

    config: Mapping[str, Any]
    storage_layers: int
    kinds: tuple[Kind, ...]
    seeds: tuple[int, ...]
    recipe: Recipe
    texts: Path | None = None

    def described(self, kind: Kind) -> dict[str, Any]:
        """Return the config.json of a kind.

        It is not checked here. `CrossLayerConfig.of` raises CrossLayerConfigError when it reads it
        if the number of storage layers does not suit the kind or the model.
        """
        layers = self.config["num_hidden_layers"]
        stored = layers if kind == "vanilla" else self.storage_layers
        return {
            **self.config,
            "architectures": [f"KVFusion{self.config['model_type'].capitalize()}ForCausalLM"],
            "kv_fusion": {"kind": kind, "storage_layers": stored},
        }

    def runs(self) -> Iterator[tuple[Kind, int]]:
        """Yield (kind, seed) in the order of training."""
        for seed in self.seeds:
            for kind in self.kinds:
                yield kind, seed


def compare(
    asked: Comparison,
    folder: Path,
    *,
    report: Callable[[str, Losses], None] = lambda name, losses: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Losses]:
    """Train the runs that have not ended and that no other process trains.

    Return the losses by KIND-SEED.

    Args:
        report: called with a run's name and losses at each of its validations.
        stop: called after each step; if it returns True, a checkpoint is written and training ends.

    Raises:
        SettingsError, CorpusError, CrossLayerConfigError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder, wait=True):
        _agree(asked, folder)
        tokenizer, train, valid = _data(asked, folder)
    settings = digest(asked, folder)
    for name, known in read_losses(folder).items():
        if known.settings != settings:
            raise SettingsError(f"{folder / LOSSES / name}.json is of other settings or texts")
    for kind, seed in asked.runs():
        name = f"{kind}-{seed}"
        with _only_one(folder / name) as mine:
            known = read_losses(folder).get(name, Losses())
            if not mine or known.final is not None:
                continue
            run = Run(asked.described(kind), asked.recipe, seed, settings, folder / name)

            def save(found: Losses, name: str = name) -> None:
                _write(folder / LOSSES / f"{name}.json", asdict(found))
                report(name, found)

            if not run.train(train, valid, report=save, stop=stop):
                break
            write(folder / name, asked.described(kind), run.model)
            _write(
                folder / name / "tokenizer_config.json",
                {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END},
            )
            tokenizer.save(str(folder / name / "tokenizer.json"))
            (folder / name / STATE).unlink(missing_ok=True)
    return read_losses(folder)


def read_losses(folder: Path) -> dict[str, Losses]:
    """Return the losses of all runs so far, by KIND-SEED; kinds in the order of `KINDS`."""
    files = (folder / LOSSES / f"{kind}-*.json" for kind in KINDS)
    found = [file for each in files for file in sorted(each.parent.glob(each.name))]
    return {file.stem: Losses(**json.loads(file.read_text())) for file in found}


def digest(asked: Comparison, folder: Path) -> str:
    """Return a digest of the settings and the tokens; losses with the same one are comparable."""
    settings = [dict(asked.config), asked.storage_layers, asdict(asked.recipe)]
    found = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in ("train.npy", "valid.npy"):
        found.update((folder / name).read_bytes())
    return found.hexdigest()[:16]


def validation(folder: Path, windows: int) -> Tensor:
    """Return the first windows of the validation tokens, int64 [windows, context]."""
    context = json.loads((folder / SETTINGS).read_text())["recipe"]["context"]
    tokens = np.load(folder / "valid.npy", mmap_mode="r")
    found = windows_of(tokens, context)[:windows, :-1]
    return torch.from_numpy(found.astype(np.int64))


def plot(losses: Mapping[str, Losses], file: Path) -> None:
    """Plot the validation loss by tokens, and its difference from vanilla with the same seed.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (whole, apart) = pyplot.subplots(1, 2, figsize=(10, 4))
    kinds = list(dict.fromkeys(name.rsplit("-")[0] for name in losses))
    for name, found in losses.items():
        kind, seed = name.rsplit("-")
        looks = {"color": f"C{kinds.index(kind)}", "linestyle": ("-", "--", ":")[int(seed) % 3]}
        label = kind if seed == "0" else None
        points = dict(found.valid)
        whole.plot(points.keys(), points.values(), label=label, **looks)
        base = dict(losses[f"vanilla-{seed}"].valid) if f"vanilla-{seed}" in losses else {}
        both = [tokens for tokens in points if tokens in base]
        apart.plot(both, [points[n] - base[n] for n in both], label=label, **looks)
    whole.set(xlabel="tokens", ylabel="loss on validation, nats")
    apart.set(xlabel="tokens", ylabel="loss above vanilla's, nats")
    whole.legend()
    figure.savefig(file, dpi=90, bbox_inches="tight")
    pyplot.close(figure)


def _agree(asked: Comparison, folder: Path) -> None:
    """Write the settings, or compare them. Kinds and seeds may differ from earlier calls."""
    mine = {
        "config": dict(asked.config),
        "storage_layers": asked.storage_layers,
        "recipe": asdict(asked.recipe),
        "texts": None if asked.texts is None else str(asked.texts.resolve()),
    }
    file = folder / SETTINGS
    if not file.exists():
        _write(file, mine)
        return
    theirs = json.loads(file.read_text())
    if differ := sorted(name for name in mine if mine[name] != theirs.get(name)):
        raise SettingsError(
            f"{folder} holds runs with other settings ({', '.join(differ)}): name another folder, "
            f"or ask for what its {SETTINGS} says"
        )


def _data(asked: Comparison, folder: Path) -> tuple[Tokenizer, Tokens, Tokens]:
    """Return the tokenizer, and the tokens for training and validation; make them if missing."""
    known, cut = folder / "tokenizer.json", [folder / "train.npy", folder / "valid.npy"]
    if not cut[1].exists():
        train, valid = sides(asked.texts)
        tokenizer = learn_vocabulary(train, asked.config["vocab_size"])
        tokenizer.save(str(known))
        seen: set[bytes] = set()
        for file, texts, tokens in zip(
            cut, (train, valid), (asked.recipe.tokens + 1, asked.recipe.valid_tokens), strict=True
        ):
            beside = file.with_suffix(".new.npy")
            np.save(beside, stream(tokenizer, texts, tokens, seen))
            os.replace(beside, file)
    tokenizer = Tokenizer.from_file(str(known))
    return tokenizer, np.load(cut[0], mmap_mode="r"), np.load(cut[1], mmap_mode="r")


@contextmanager
def _only_one(folder: Path, wait: bool = False) -> Iterator[bool]:
    """Lock a folder, and yield whether this process holds the lock. If a process dies, the kernel
    releases its lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _write(file: Path, content: Any) -> None:
    """Replace a JSON file; a reader finds either the whole old file or the whole new one."""
    file.parent.mkdir(exist_ok=True)
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(content, indent=1))
    os.replace(beside, file)
