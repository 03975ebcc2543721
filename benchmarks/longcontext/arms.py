"""The compared rules, each of which returns the KV kept of a context. kvpress's are in `peers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.longcontext.context import Context
from benchmarks.longcontext.held import Held
from benchmarks.longcontext.quantised import quantised, ratio
from headrace_decode.compression.importance_predictor import ImportancePredictor, to_position_zero
from headrace_decode.compression.refit import KEY_RIDGE, RIDGE, sample_rows
from headrace_decode.compression.scores import combined_scores, to_later_positions
from headrace_decode.compression.selection import AlwaysKept, select_token_pages, select_tokens
from headrace_lab.compression.entropy_budgets import by_entropy, entropies
from headrace_lab.models.lm import LM

OURS = "ours"
AS_ENGINES = f"{OURS}, as an engine keeps it"
SHARES = 0.5, 0.25, 0.12
MAIN_SHARE = 0.25
PAGE_TOKENS = 32
"""Tokens of a page that an engine's heads keep."""
HEADS_FLOOR = 0.02
"""Minimum share of a head's tokens, under budgets from entropy."""
Ridges = tuple[float | None, float | None]
VALUES, BOTH, LEFT = (RIDGE, None), (RIDGE, KEY_RIDGE), (None, None)
"""Ridges for fitting values only, values and keys, or nothing."""
Scores = Callable[[LM, Context], Tensor]
"""fp32 [layers, heads, tokens]."""


def both(lm: LM, context: Context) -> Tensor:
    """Score by queries of the repeated context, and by the context's own as if they came later."""
    parts = zip(context.repeated, context.expected, strict=True)
    return torch.stack([combined_scores(one) for one in parts])


def latest(lm: LM, context: Context) -> Tensor:
    """Score like `both`, but of the context's own queries use those of its last rows."""
    parts = zip(context.repeated, context.latest, strict=True)
    return torch.stack([combined_scores(one) for one in parts])


def repeated(lm: LM, context: Context) -> Tensor:
    return torch.stack([one.root_mean_square() for one in context.repeated])


def largest(lm: LM, context: Context) -> Tensor:
    return torch.stack([one.largest for one in context.repeated])


def expected(lm: LM, context: Context) -> Tensor:
    """Score by queries of the context itself, as if they came later, without repetition."""
    return torch.stack([one.root_mean_square() for one in context.expected])


def window(lm: LM, context: Context) -> Tensor:
    """Score by the last rows' queries (SnapKV)."""
    found = []
    for keys, queries in zip(context.kv.keys, context.window, strict=True):
        by_head = queries.unflatten(1, (lm.kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        logits = by_head @ keys.permute(1, 2, 0) * lm.dim**-0.5
        found.append(logits.softmax(-1).mean(1))
    return torch.stack(found)


def times_values(inner: Scores) -> Scores:
    """Times the size of what a token's value adds to the hidden state: the most of its group."""

    def scores(lm: LM, context: Context) -> Tensor:
        size = []
        for layer, values in enumerate(context.kv.values):
            by_head = lm.output(layer)
            added = torch.einsum("jhgd,nhd->hgnj", by_head, values).norm(dim=-1)
            size.append(added.amax(1))
        return inner(lm, context) * torch.stack(size)

    return scores


def has_predictor(predictor: ImportancePredictor) -> Scores:
    """Return a score like `latest` in which a predictor replaces queries of the context."""

    def scores(lm: LM, context: Context) -> Tensor:
        found = []
        for layer, (keys, values) in enumerate(
            zip(context.kv.keys, context.kv.values, strict=True)
        ):
            told = predictor.scores(layer, to_position_zero(lm.rope, keys), values.transpose(0, 1))
            found.append(torch.hypot(told, context.latest[layer].root_mean_square()))
        return torch.stack(found)

    return scores


@dataclass(frozen=True)
class Arm:
    """One rule.

    Attributes:
        scores: function that ranks the tokens.
        ridges: for the fits of values and of keys (`headrace_decode.compression.refit.fit`).
        budgets: one for all ("all"), the same for each "layer" or "head", or by "entropy".
        queries: the queries that both fits use: of "sampled" repeating rows, of "earlier" ones, of
            "both", or of the "last" rows, as an engine does.
        page_tokens: heads keep whole pages of this many tokens, and all tokens after the
            last full page.
        codec: codec of the store in which the retained KV is stored, so that more of it fits; None:
            without a codec.
        main: whether it is measured at every share.
    """

    name: str
    scores: Scores = both
    ridges: Ridges = VALUES
    budgets: str = "all"
    always: AlwaysKept = field(default_factory=AlwaysKept)
    queries: str = "both"
    page_tokens: int = 1
    codec: str | None = None
    main: bool = False

    def held(self, lm: LM, context: Context, share: float) -> Held:
        """Return the KV that is kept under a share of the bytes."""
        scores = self.scores(lm, context)
        pairs = min(1.0, share / self.bytes_of_pair(lm)) * scores.numel()
        kept = self._kept(lm, context, scores, int(pairs))
        stays = [[head.nonzero()[:, 0] for head in layer] for layer in kept]
        whole = Held.whole(context.kv, 0, scores.shape[-1])
        held = whole.kept(stays, self._asked(lm, context), *self.ridges)
        return held if self.codec is None else quantised(held, self.codec)

    def bytes_of_pair(self, lm: LM) -> float:
        """Return the bytes of a kept pair over those of a pair of the engine's own KV."""
        return 1.0 if self.codec is None else ratio(self.codec, lm.dim)

    def _kept(self, lm: LM, context: Context, scores: Tensor, total: int) -> Tensor:
        layers, heads, tokens = scores.shape
        if self.page_tokens > 1:
            return self._in_pages(scores, total)
        if self.budgets == "all":
            return select_tokens(scores, total, self.always)
        if self.budgets == "layer":
            each = [select_tokens(one[None], total // layers, self.always) for one in scores]
            return torch.cat(each)
        budgets = torch.full((layers, heads), total // (layers * heads))
        if self.budgets == "entropy":
            entropy = [_entropy(lm, context, layer) for layer in range(layers)]
            budgets = entropy_budgets(torch.stack(entropy), total, tokens, self.always)
        return select_tokens(scores, total, self.always, budgets)

    def _in_pages(self, scores: Tensor, total: int) -> Tensor:
        layers, heads, tokens = scores.shape
        behind = tokens % self.page_tokens
        pages = (total - layers * heads * behind) // self.page_tokens
        kept = torch.ones(scores.shape, dtype=torch.bool)
        full = slice(tokens - behind)
        kept[..., full] = select_token_pages(
            scores[..., full], pages, self.page_tokens, self.always
        )
        return kept

    def _asked(self, lm: LM, context: Context) -> list[Tensor]:
        """Return the queries that both are fitted to, by layer."""
        if self.queries == "last":
            return [sample_rows(to_later_positions(one, lm.rope)) for one in context.last]
        kinds = {"sampled": context.sampled, "earlier": context.earlier}
        if self.queries != "both":
            return kinds[self.queries]
        return [torch.cat(pair) for pair in zip(*kinds.values(), strict=True)]


def entropy_budgets(entropy: Tensor, total: int, tokens: int, always: AlwaysKept) -> Tensor:
    """Return budgets as `by_entropy` does, after the first layers, which stay whole."""
    layers, heads = entropy.shape
    floor = int(HEADS_FLOOR * tokens) + always.sinks + always.newest
    whole = min(always.whole_layers, layers)
    rest = by_entropy(entropy[whole:], total - whole * heads * tokens, tokens, floor)
    return torch.cat([torch.full((whole, heads), tokens), rest])


def _entropy(lm: LM, context: Context, layer: int) -> Tensor:
    """Return the entropy of the last rows' attention, averaged over the heads of a group: fp32
    [kv_heads]."""
    queries = context.window[layer].transpose(0, 1) * lm.dim**-0.5
    group = lm.heads // lm.kv_heads
    keys = context.kv.keys[layer].transpose(0, 1).repeat_interleave(group, 0)
    return entropies(queries, keys).unflatten(0, (-1, group)).mean(1)


ARMS = (
    Arm(OURS, main=True),
    Arm(f"{OURS}, values as they were", ridges=LEFT, main=True),
    Arm(f"{OURS}, keys moved", ridges=BOTH, main=True),
    Arm(f"{OURS}, keys moved, in fp8", ridges=BOTH, codec="fp8", main=True),
    Arm(f"{OURS}, keys moved, in int4", ridges=BOTH, codec="int4", main=True),
    Arm(AS_ENGINES, latest, BOTH, queries="last", page_tokens=PAGE_TOKENS, main=True),
    Arm(
        *(f"{AS_ENGINES}, keys and values as they were", latest),
        ridges=LEFT,
        page_tokens=PAGE_TOKENS,
        main=True,
    ),
    Arm(f"{OURS}, repetition alone", repeated, queries="sampled"),
    Arm(f"{OURS}, repetition alone, values as they were", repeated, ridges=LEFT),
    Arm(f"{OURS}, repetition alone, largest weight", largest, queries="sampled"),
    Arm(f"{OURS}, no repetition", expected, queries="earlier", main=True),
    Arm(f"{OURS}, no repetition, values as they were", expected, ridges=LEFT),
    Arm(f"{OURS}, times values", times_values(both)),
    Arm(f"{OURS}, a budget for each layer", budgets="layer"),
    Arm(f"{OURS}, a budget for each head", budgets="head"),
    Arm(f"{OURS}, two layers whole", always=AlwaysKept(whole_layers=2)),
    Arm(f"{OURS}, budgets by entropy", budgets="entropy"),
    Arm(
        *("entropy, two layers whole", window),
        ridges=LEFT,
        budgets="entropy",
        always=AlwaysKept(whole_layers=2),
        main=True,
    ),
    Arm("entropy", window, ridges=LEFT, budgets="entropy"),
    Arm("window scores, one budget", window, ridges=LEFT),
)
