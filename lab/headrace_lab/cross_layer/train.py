"""Training of a decoder from scratch; a run that was killed continues from its last checkpoint.

Kinds of models are compared at equal tokens: runs of one seed see the same windows in the same
order, and parameters of the same name begin with the same values. A run that continues has the same
result as a run without interruption.

AdamW with a linear warm-up and a linear decay to zero; no weight decay for norms and mixing
weights.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from headrace_lab.cross_layer.head_loss import head_loss
from headrace_lab.models.decoder import Decoder
from headrace_lab.texts.corpus import Tokens

STATE = "state.pt"
CHECKPOINT_S = 180.0
INITIAL_STD = 0.02
BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
WARM_UP = 0.05
"""Share of the steps in which the learning rate rises."""
VALIDATIONS, VALIDATION_WINDOWS = 20, 64
"""Number of validations of a run, and the windows that each uses. After the last step all windows
are used."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a run.

    Attributes:
        tokens: total number of tokens.
        context: tokens of a window.
        batch: windows of a step.
        learning_rate: maximum learning rate.
        bfloat16: whether steps compute matrix products in bfloat16; weights and validation are
            float32.
    """

    tokens: int
    context: int = 256
    batch: int = 8
    learning_rate: float = 2e-3
    bfloat16: bool = False

    @property
    def step_tokens(self) -> int:
        return self.context * self.batch

    @property
    def steps(self) -> int:
        """Number of whole steps in the tokens."""
        return self.tokens // self.step_tokens

    @property
    def valid_tokens(self) -> int:
        """Number of tokens to validate on: a twentieth of `tokens`, at least a step's, plus one."""
        return max(self.tokens // 20, self.step_tokens) + 1

    def rate(self, step: int) -> float:
        """Return the learning rate of a step; steps count from 0."""
        warm = max(1, round(WARM_UP * self.steps))
        falling = (self.steps - step) / max(1, self.steps - warm)
        return self.learning_rate * min((step + 1) / warm, falling)


@dataclass
class Losses:
    """Losses of one run, in nats a token.

    Attributes:
        settings: digest of the settings and tokens that all compared runs have in common.
        parameters: number of parameters of the model.
        train: (tokens so far, mean loss since the point before).
        valid: (tokens so far, loss on the first windows of the validation tokens).
        final: the loss on all validation windows, when the run has ended.
        compute_s: seconds that steps took.
    """

    settings: str = ""
    parameters: int = 0
    train: list[tuple[int, float]] = field(default_factory=list)
    valid: list[tuple[int, float]] = field(default_factory=list)
    final: float | None = None
    compute_s: float = 0.0


class Run:
    """One model in training.

    Args:
        config: a parsed config.json with `kv_fusion`.
        seed: seed of the initial weights and of the order of windows.
        settings: digest that is stored with the losses.
        folder: for the checkpoint; made if it does not exist.
    """

    def __init__(
        self, config: Mapping[str, Any], recipe: Recipe, seed: int, settings: str, folder: Path
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._recipe, self._seed, self._state = recipe, seed, folder / STATE
        self.model = Decoder(config)
        begin(self.model, seed)
        self._optimizer = _optimizer(self.model)
        self.losses = Losses(settings, sum(weight.numel() for weight in self.model.parameters()))
        self._step, self._since_validation = 0, [0.0, 0.0]
        if self._state.exists():
            self._restore()

    def train(
        self,
        train: Tokens,
        valid: Tokens,
        *,
        report: Callable[[Losses], None] = lambda losses: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train to the end; return False if the run was stopped before.

        Args:
            report: called at each validation.
            stop: called after each step; if it returns True, a checkpoint is written and the run
                ends.
        """
        recipe, losses = self._recipe, self.losses
        windows, validation = windows_of(train, recipe.context), windows_of(valid, recipe.context)
        order = WindowOrder(len(windows), self._seed)
        due = {math.ceil(recipe.steps * n / VALIDATIONS) for n in range(1, VALIDATIONS + 1)}
        saved = time.monotonic()
        while self._step < recipe.steps:
            begun = time.monotonic()
            numbers = order.at(self._step * recipe.batch, recipe.batch)
            self._learn(windows[numbers])
            losses.compute_s += time.monotonic() - begun
            self._step += 1
            if self._step in due:
                tokens = self._step * recipe.step_tokens
                total, count = self._since_validation
                losses.train.append((tokens, total / count))
                some = validation[:VALIDATION_WINDOWS]
                losses.valid.append((tokens, loss_of(self.model, some, recipe.batch)))
                self._since_validation = [0.0, 0.0]
                report(losses)
            halted = stop()
            if halted or time.monotonic() - saved > CHECKPOINT_S:
                self._save()
                saved = time.monotonic()
            if halted:
                return False
        losses.final = loss_of(self.model, validation, recipe.batch)
        report(losses)
        return True

    def _learn(self, windows: Tokens) -> None:
        """Run one step of the optimizer."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.rate(self._step)
        with torch.enable_grad():
            loss = _loss_to_learn(self.model, windows, self._recipe.bfloat16)
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._since_validation[0] += float(loss.detach())
        self._since_validation[1] += 1

    def _save(self) -> None:
        """Replace the checkpoint; a reader finds either the whole old file or the whole new one."""
        beside = self._state.with_suffix(".new")
        with beside.open("wb") as file:
            torch.save(
                {
                    "step": self._step,
                    "since_look": self._since_validation,
                    "model": self.model.state_dict(),
                    "optimizer": self._optimizer.state_dict(),
                    "losses": asdict(self.losses),
                },
                file,
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self._state)

    def _restore(self) -> None:
        state = torch.load(self._state, weights_only=True)
        self._step, self._since_validation = state["step"], state["since_look"]
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.losses = Losses(**state["losses"])


class WindowOrder:
    """The order of windows: in each epoch every window once, in a different order.

    Args:
        windows: number of windows.
    """

    def __init__(self, windows: int, seed: int) -> None:
        self._windows, self._seed = windows, seed

    def at(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the windows at these places of the order."""
        epochs, places = np.divmod(np.arange(first, first + count), self._windows)
        orders = {number: self._epoch(number) for number in set(epochs.tolist())}
        return np.array([orders[e][p] for e, p in zip(epochs.tolist(), places, strict=True)])

    def _epoch(self, number: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, number]).permutation(self._windows)


def begin(model: Decoder, seed: int) -> None:
    """Set the initial weights of a model.

    They are normal, with a smaller deviation in the projections back to the residual. Norms are 1,
    mixtures are the mean. A parameter's values depend only on its name, its shape, the number of
    layers and the seed."""
    residual = INITIAL_STD / math.sqrt(2 * model.shape.cross_layer.layers)
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or ".mix." in name:
            continue
        own = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        back = name.endswith(("o_proj.weight", "down_proj.weight"))
        nn.init.normal_(weight, 0.0, residual if back else INITIAL_STD, own)


def windows_of(tokens: Tokens, context: int) -> Tokens:
    """Return windows [windows, context + 1]; a window's last token is the next one's first."""
    count = (len(tokens) - 1) // context
    return np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context][:count]


@torch.no_grad()
def loss_of(model: Decoder, windows: Tokens, batch: int) -> float:
    """Return the mean loss on windows [n, context + 1], nats a token."""
    parts = [windows[at : at + batch] for at in range(0, len(windows), batch)]
    return sum(float(_loss(model, part)) * len(part) for part in parts) / len(windows)


def _loss(model: Decoder, windows: Tokens) -> Tensor:
    tokens = torch.from_numpy(windows.astype(np.int64))
    logits = model(tokens[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def _loss_to_learn(model: Decoder, windows: Tokens, bfloat16: bool) -> Tensor:
    """Return the same as `_loss`, faster if gradients are needed."""
    tokens = torch.from_numpy(windows.astype(np.int64))
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        hidden = model.model.norm(model.states(tokens[:, :-1]))
    dtype = torch.bfloat16 if bfloat16 else hidden.dtype
    return head_loss(hidden.flatten(0, 1), model.lm_head.weight, tokens[:, 1:].flatten(), dtype)


def _optimizer(model: Decoder) -> torch.optim.AdamW:
    decayed: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, weight in model.named_parameters():
        decayed[weight.ndim >= 2 and ".mix." not in name].append(weight)
    groups = [
        {"params": decayed[True], "weight_decay": DECAY},
        {"params": decayed[False], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)
