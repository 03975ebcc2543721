"""Training of a model's predictor on contexts that were read again.

The loss is the mean square error of log(s + floor), over tokens and heads. The floor is the median
score: tokens that are dropped under any budget need not be distinguished. The first tokens are
always kept, so the predictor does not learn from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_decode.compression.importance_predictor import ImportancePredictor
from headrace_decode.compression.selection import AlwaysKept

WIDTH = 32
STEPS, TOKENS_A_STEP, RATE = 1000, 384, 3e-3


class Samples:
    """KV of contexts, and each token's score from reading them again.

    Memory: 4 head_dim + 4 bytes for each token, layer and KV head.
    """

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._scores: list[Tensor] = []

    def add(self, keys: Tensor, values: Tensor, scores: Tensor) -> None:
        """Add a context.

        Args:
            keys, values: [layers, kv_heads, tokens, head_dim]; keys rotated back to position 0.
            scores: fp32 [layers, kv_heads, tokens].
        """
        first = AlwaysKept().sinks
        self._inputs.append(torch.cat([keys, values], -1)[:, :, first:].half())
        self._scores.append(scores[..., first:])

    def learned(self, width: int = WIDTH, steps: int = STEPS) -> ImportancePredictor:
        """Return a predictor trained to predict the scores."""
        inputs, scores = torch.cat(self._inputs, 2), torch.cat(self._scores, 2)
        logs = (scores + scores.median()).log()
        layers, heads, tokens, size = inputs.shape
        centre, spread = _moments(inputs)
        level, scale = logs.mean(-1, keepdim=True), logs.std(-1, keepdim=True) + 1e-3
        rng = torch.Generator().manual_seed(0)
        into, shift, out, straight, bias = parts = [
            (begin * torch.randn(layers, heads, *shape, generator=rng)).requires_grad_()
            for begin, shape in (
                (size**-0.5, (size, width)),
                (0.0, (1, width)),
                (0.3 * width**-0.5, (width, 1)),
                (0.0, (size, 1)),
                (0.0, (1, 1)),
            )
        ]
        optimizer = torch.optim.Adam(parts, RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        with torch.enable_grad():
            for _ in range(steps):
                at = torch.randint(tokens, (TOKENS_A_STEP,), generator=rng)
                x = (inputs[:, :, at].float() - centre) / spread
                said = ((x @ into + shift).relu() @ out + x @ straight + bias)[..., 0]
                loss = (scale * said + level - logs[:, :, at]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        # The predictor takes inputs that are not normalised: its weights include centre, spread,
        # scale.
        into, shift, out, straight, bias = (part.detach() for part in parts)
        into, straight = (part / spread.transpose(-1, -2) for part in (into, straight))
        shift, bias = shift - centre @ into, bias - centre @ straight
        return ImportancePredictor(
            into,
            shift[..., 0, :],
            scale * out[..., 0],
            scale * straight[..., 0],
            (scale * bias[..., 0] + level)[..., 0],
        )


def _moments(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation over tokens, fp32 [layers, heads, 1, size] each.

    They are computed layer by layer, since all inputs in fp32 may not fit in memory."""
    both = [torch.std_mean(layer.float(), 1, keepdim=True) for layer in inputs]
    spread, centre = (torch.stack(part) for part in zip(*both, strict=True))
    return centre, spread + 1e-4
