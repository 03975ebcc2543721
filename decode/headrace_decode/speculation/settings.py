"""What switches PMR-Tree drafting on in an engine, and what a request may say about it.

    AsyncEngineArgs(model=..., **engine_arguments(16))

Any other of vLLM's drafters is a line of its own instead, as vLLM documents it:
`speculative_config={"method": "ngram", ...}`, "suffix", "eagle3", "draft_model".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace_decode.speculation.planner import Mode
from headrace_decode.speculation.session import Facts

CONFIG_KEY = "headrace_speculation"
"""In the engine's `additional_config`."""
REQUEST_KEY = "headrace"
"""In a request's `sampling_params.extra_args`: our server's word; a client's is dropped."""
OPT_OUT_KEY = "headrace_draft"
"""In a request's `vllm_xargs`: 0 and nothing is drafted for it or kept of it. For clients."""

PROPOSER = "headrace_decode.speculation.proposer.HeadraceProposer"
WORKER = "headrace_decode.speculation._vllm_compat.SpeculatingWorker"
DRAFTERS = ("memory", "ngram")


@dataclass(frozen=True)
class Settings:
    """Of one engine's drafting.

    Attributes:
        mode: "auto", "off" or "static:K" (`planner.Mode`).
        drafter: "memory" (`memory.Memory`), "ngram" (`ngram.NgramDrafter`), or "module:function",
            which returns a `draft.Drafter`.
        drafter_options: arguments of its settings, or of that function.
        controls: whether to run random steps without drafts and heed what they say.
        seed: of those.
    """

    mode: str = "auto"
    drafter: str = "memory"
    drafter_options: Mapping[str, Any] | None = None
    controls: bool = True
    seed: int = 0

    @staticmethod
    def read(config: Mapping[str, Any]) -> Settings:
        """From `additional_config[CONFIG_KEY]`.

        Raises:
            ValueError: a key is unknown, or a value is wrong.
        """
        known = {field.name for field in fields(Settings)}
        unknown = sorted(set(config) - known)
        if unknown:
            raise ValueError(f"{CONFIG_KEY}: unknown {unknown}; known are {sorted(known)}")
        settings = Settings(**config)
        Mode.parse(settings.mode)
        if settings.drafter not in DRAFTERS and settings.drafter.count(":") != 1:
            raise ValueError(
                f"{CONFIG_KEY}.drafter {settings.drafter!r}: expected one of {', '.join(DRAFTERS)} "
                "or module:function"
            )
        return settings


def engine_arguments(draft_tokens: int, **settings: Any) -> dict[str, Any]:
    """Arguments of a vLLM engine that drafts: at most `draft_tokens` a row and step.

    The schedule by batch size says nothing to a class of one's own; that there is one keeps the
    scheduler from filling a decode request that joins the batch (its KV came from elsewhere) up to
    `1 + draft_tokens` tokens with placeholders.

    Raises:
        ValueError: as `Settings.read`.
    """
    Settings.read(settings)
    return {
        "worker_cls": WORKER,
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": draft_tokens,
            "num_speculative_tokens_per_batch_size": [[1, 1, draft_tokens]],
        },
        "additional_config": {CONFIG_KEY: settings},
    }


def request_arguments(
    extra_args: Mapping[str, Any] | None,
    *,
    tenant: str,
    tag: str = "",
    itl_s: float | None = None,
    drafts: bool = True,
) -> dict[str, Any]:
    """A request's `extra_args` with what its engine must know; what a client wrote there is lost.

    Args:
        tenant: nothing of one tenant is drafted for another.
        drafts: the tenant's policy; a client may opt out by `OPT_OUT_KEY`, never in.
    """
    kept = {k: v for k, v in (extra_args or {}).items() if k not in (REQUEST_KEY, OPT_OUT_KEY)}
    wanted = (extra_args or {}).get(OPT_OUT_KEY, 1)
    told: dict[str, Any] = {"tenant": tenant, "tag": tag, "drafts": drafts and not _is_no(wanted)}
    if itl_s is not None:
        told["itl_s"] = itl_s
    return {**kept, REQUEST_KEY: told}


def facts_of(
    prompt_tokens: int, max_tokens: int | None, extra_args: Mapping[str, Any] | None
) -> Facts:
    """What a request brings along. Without word from our server it shares a nameless tenant with
    its like; what cannot be read is left out."""
    told = (extra_args or {}).get(REQUEST_KEY)
    if not isinstance(told, Mapping):
        told = {}
    itl_s = told.get("itl_s")
    good_itl = isinstance(itl_s, int | float) and math.isfinite(itl_s) and itl_s > 0
    return Facts(
        prompt_tokens=prompt_tokens,
        tenant=str(told.get("tenant", "")),
        tag=str(told.get("tag", "")),
        drafts=bool(told.get("drafts", True)),
        itl_s=float(itl_s) if good_itl else math.inf,  # type: ignore[arg-type]
        max_tokens=max_tokens,
        calibrates=bool(told.get("calibrates", False)),
    )


def _is_no(value: Any) -> bool:
    return value in (0, False, "0", "no", "off", "false")
