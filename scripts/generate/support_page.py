"""Makes the page docs/support.md from `benchmarks/families/results.json`, the results of
`python -m benchmarks.families`.

A cell says what was tested. Where nothing was tested, it says why an engine refuses the feature, or
that the engine has no reason to refuse it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.families.cases import CASES, CLOSE, TIE, tolerated
from headrace_engine.vllm.attention.layers import unsupported_model

RESULTS = Path(__file__).parents[2] / "benchmarks" / "families" / "results.json"

INTRODUCTION = """\
<!-- Written by `python -m scripts.generate`; change scripts/generate/support_page.py. -->
# Support by model family

Look up here what has been tested with your model's family, what an engine refuses, and why. This page is made from
the results of `python -m benchmarks.families` and from the reasons that the engines of that run gave.
[Supported models and features](models.md) has what depends on no family, and models that are not listed here.

Each family is a tiny model with random weights: {families} families, on CPUs, vLLM {vllm}, {first} to {last}. Two engines on two machines of
one loopback answered {answers} prompts with {tokens} tokens each in each case, and the tokens were compared with those of plain vLLM.

| cell | meaning |
|---|---|
| tested | all answers were plain vLLM's, and all blocks were given back |
| by construction | no engine of this family refuses it; the [grounds](#grounds) name tests with other models |
| not tested | nothing refuses it, and nothing has tested it |
| refused | an engine refuses it and [says why](#why-not). With a refused technique, or store, the requests are served without it |
| plain vLLM | plain vLLM on a CPU could not serve the case, so nothing was compared |
| **failing** | answers differed, or the case failed |

## Features
"""  # noqa: E501
GROUNDS = """
### Grounds

| column | a case of the run, or the grounds of "by construction" |
|---|---|
| prefill and decode | `remote prefill`, `failed transfer` |
| store | `local hit`, `store hit`, `local prefix, store tail` |
| tiers | `peer`: DRAM of another node. NVMe and objects hold the same bytes, which a load verifies (`tests/integration/test_kv_far_tiers_engine.py`) |
| resume | `resume after kill` |
| drafting | `drafting`, with Headrace's retrieval memory |
| blending, sparse, compression | the engine's own checks with all techniques on. Tests of the techniques use Llamas: `tests/integration/test_blending_engine.py`, `test_sparse_engine.py`, `test_compression_engine.py`. Blending is also tested with Qwen3-MoE, Mixtral and ERNIE 4.5: `test_blending_families_engine.py` |
| LoRA | vLLM's class takes adapters. Prompts with an adapter are prefilled by the decode replica, and their blocks are named by the adapter's content (`tests/unit/test_kv_adapters.py`). Blending is refused with `enable_lora` |
| TP | heads are divided over ranks (`tests/integration/test_kv_ranks_engine.py`, with a Llama). [Compression](#techniques) is refused: {tp} |
| 8-bit KV | blocks are moved and kept as the engine has them, and its dtype is part of their identity (`tests/unit/test_kv_identity.py`). Techniques are refused: {quantised} |
"""  # noqa: E501

TECHNIQUES = """
## Techniques

Whether an engine has a technique if it also has the feature of the column. Letters lead to what is missing.

| technique | GPU | TP above 1 | prefill and decode | store | prefix cache |
|---|---|---|---|---|---|
| speculative decoding | yes (a) | not tested | yes | yes | yes |
| blending | yes (a) | yes | yes | needs it | yes |
| sparse attention | yes, with a calibration | yes | yes | yes | yes |
| sparse attention with offload | yes, with a calibration (a) | yes | yes | no (b) | yes |
| compression | yes (a) | no (c) | yes; a streamed prompt is computed by the decode engine | yes | yes |
| cross-layer KV sharing | yes | not tested | yes | yes | yes |

| | missing |
|---|---|
| a | no card has run it ([the list](gpu.md#open-and-answered-questions)) |
| b | by design: an offloaded request neither loads nor saves blocks |
| c | code. The choice compares the heads of all layers, so ranks must agree on it; stored contexts have all heads |

Tests: each pair of techniques on one engine (`tests/integration/test_extension_pairs.py`), sparse attention, offload and blending with two ranks (`test_sparse_ranks_engine.py`, `test_blending_ranks_engine.py`), and sparse attention, offload and compression as on a GPU in Triton's interpreter (`test_sparse_card_engine.py`, `test_sparse_card_offload_engine.py`, `test_compression_card_engine.py`).
"""  # noqa: E501


class Feature(NamedTuple):
    """A column of the page.

    Attributes:
        name: its head.
        cases: names of the cases that test it.
        technique: its name among an engine's `unsupported`; empty for none.
    """

    name: str
    cases: tuple[str, ...] = ()
    technique: str = ""


FEATURES = (
    Feature("prefill and decode", ("remote prefill", "failed transfer")),
    Feature("store", ("local hit", "store hit", "local prefix, store tail")),
    Feature("tiers", ("peer",)),
    Feature("resume", ("resume after kill",)),
    Feature("drafting", ("drafting",)),
    Feature("blending", technique="blending"),
    Feature("sparse", technique="sparse"),
    Feature("compression", technique="compression"),
    Feature("LoRA"),
    Feature("TP"),
    Feature("8-bit KV"),
)
BY_CONSTRUCTION, NOT_TESTED = "by construction", "not tested"
NO_ADAPTERS = "vLLM's class of this model takes no adapters"


class Reasons:
    """The numbered reasons of the page."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        """Return the number of a reason, a new one for a new text."""
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text) + 1


def page() -> str:
    """Return the page."""
    return render(json.loads(RESULTS.read_text("utf-8")))


def render(document: Mapping[str, Any]) -> str:
    """Return the page of a results file."""
    families = document["families"]
    dates = sorted(found["date"] for found in families.values())
    cases = [case for found in families.values() for case in found["cases"].values()]
    introduction = INTRODUCTION.format(
        families=len(families),
        vllm=document["environment"]["versions"]["vllm"],
        first=dates[0],
        last=dates[-1],
        answers=max(case.get("answers", 0) for case in cases),
        tokens=document["answer_tokens"],
    )
    reasons = Reasons()
    heads = ["family", "layers", *(feature.name for feature in FEATURES)]
    rows = [
        [found["title"], found["layers"], *(_cell(found, one, reasons) for one in FEATURES)]
        for found in families.values()
    ]
    grounds = GROUNDS.format(
        tp=_refusal(tensor_parallel_size=2), quantised=_refusal(cache_dtype="fp8")
    )
    why = [f"| {n + 1} | {_escaped(text)} |" for n, text in enumerate(reasons.texts)]
    return "\n".join(
        [
            introduction,
            *_table(heads, rows),
            grounds,
            "### Why not\n",
            "| | reason |\n|---|---|",
            *why,
            TECHNIQUES,
            *_answers(families),
            *_ttft(document.get("ttft")),
            "",
        ]
    )


def _cell(found: Mapping[str, Any], feature: Feature, reasons: Reasons) -> str:
    if feature.cases:
        return _tested(found, feature.cases, reasons)
    if feature.name == "TP" and "mamba" in found["facts"]["groups"]:
        return NOT_TESTED
    why = None
    if feature.technique:
        why = found["facts"]["unsupported"].get(feature.technique)
    elif feature.name == "LoRA" and not found["facts"]["lora"]:
        why = NO_ADAPTERS
    return BY_CONSTRUCTION if why is None else f"refused ({reasons.number(why)})"


def _tested(found: Mapping[str, Any], names: Sequence[str], reasons: Reasons) -> str:
    cases = [found["cases"][name] for name in names if name in found["cases"]]
    for case in cases:
        if "refused" in case:
            return f"refused ({reasons.number(case['refused'])})"
    for case in cases:
        if "plain_error" in case:
            return f"plain vLLM ({reasons.number(case['plain_error'])})"
        if "error" in case:
            return f"**failing** ({reasons.number(case['error'])})"
        if case["differing"] > tolerated(found):
            why = f"{case['differing']} of {case['answers']} answers differed"
            return f"**failing** ({reasons.number(why)})"
    if len(cases) < len(names):
        return NOT_TESTED
    if leaked := [n for n in found["leaked_blocks"].values() if n]:
        return f"**failing** ({reasons.number(f'blocks leaked: {leaked}')})"
    return "tested"


def _refusal(tensor_parallel_size: int = 1, cache_dtype: str = "auto") -> str:
    """Return why techniques refuse an engine of any family with this setting."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            use_mla=False,
            is_hybrid=False,
            is_encoder_decoder=False,
            get_sliding_window=lambda: None,
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel_size),
    )
    why = unsupported_model(config)
    if why is None:
        raise ValueError("the grounds on docs/support.md no longer hold: no technique refuses it")
    return why


def _answers(families: Mapping[str, Any]) -> list[str]:
    """Return the lines about the answers of each case."""
    cases = [case for case in CASES if any(case.name in f["cases"] for f in families.values())]
    lines = [
        "## Answers\n",
        "Number of differing answers, by case. An answer differs if a token differs, or the "
        f"log-probability of one by more than {CLOSE['float32']:g} nats ({CLOSE['bfloat16']:g} "
        "with bfloat16). A tie counts as right: the answers part where plain vLLM's own two best "
        f"tokens are within {TIE['float32']:g} nats ({TIE['bfloat16']:g} with bfloat16).\n",
        *(f"- `{case.name}`: {case.about}." for case in cases),
        "",
    ]
    heads = [
        "family",
        "dtype",
        *(case.name for case in cases),
        "ties",
        "largest error, nats",
        "blocks leaked",
    ]
    rows = []
    for found in families.values():
        counted = [case for case in found["cases"].values() if "answers" in case]
        rows.append(
            [
                found["title"],
                found["dtype"],
                *(_count(found["cases"].get(case.name)) for case in cases),
                str(sum(case["ties"] for case in counted)),
                f"{max((case['error_nats'] for case in counted), default=0.0):g}",
                str(sum(n for n in found["leaked_blocks"].values() if isinstance(n, int))),
            ]
        )
    lines += _table(heads, rows)
    for found in families.values():
        if (other := found.get("plain", {}).get("continued")) is None:
            continue
        lines.append(
            f"\n{found['title']} runs in bfloat16. Plain vLLM itself gives {other['differing']} "
            f"other answers, and {other['ties']} ties, if it is given its answers' first tokens "
            "as a part of the prompts, since its kernels for prompts and for answers round "
            "differently. No more may differ in a case."
        )
    limits = [f for f in families.values() if f["limit"]]
    if limits:
        lines += ["\nPlain vLLM's own limits on CPUs, within which the run kept:\n"]
        lines += [f"- {found['title']}: it {found['limit']}." for found in limits]
    return lines


def _ttft(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    return [
        "\n## Time to the first token\n",
        f"A prompt of {found['tokens']:,} tokens, {found['layers']} layers of the width of Gemma 3 "
        f"4B ({found['width']}), one of them with full attention, bfloat16, one core: "
        f"{found['cold_s']:.1f} s computed, {found['hit_s']:.2f} s loaded from the store, a "
        f"ratio of {found['ratio']:.3f} (`python -m benchmarks.families --ttft`, "
        f"{found['date']}).",
    ]


def _count(case: Mapping[str, Any] | None) -> str:
    if case is None:
        return NOT_TESTED
    for kind, text in (("refused", "refused"), ("plain_error", "plain vLLM"), ("error", "failing")):
        if kind in case:
            return text
    return str(case["differing"])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return [lines[0], "|" + "---|" * len(heads), *lines[1:]]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
