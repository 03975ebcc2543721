"""The section `integrity`: the checks of KV that passes from prefill to decode."""

from __future__ import annotations

from pydantic import Field

from headrace.config.section import Section
from headrace_engine.pull_proof.settings import Check


class IntegritySection(Section):
    """Checks of the KV that decode engines pull (docs/integrity.md). That the KV belongs to its
    prompt is proved for every transfer; these settings add checks of its bytes."""

    check: Check = Field(
        default="sampled",
        description="Transfers that are also checked byte for byte: `sampled` (a share of them), "
        "`all`, or `off`. KV that differs from the computed KV is not used. Then all KV of that "
        "prefill replica is checked until it has been right for long.",
    )
    rate: float = Field(
        default=0.02,
        gt=0,
        le=1,
        description="Share of the transfers that `sampled` checks.",
    )
    pull_timeout_s: float = Field(
        default=60,
        gt=0,
        description="Seconds for the bytes of one pull. Then the decode engine disconnects from "
        "that prefill engine, which ends all pulls from there, and computes the prompts. Clients "
        "do not wait so long: their prompts are computed once the plan's time is up.",
    )
    proof_timeout_s: float = Field(
        default=10,
        gt=0,
        description="Seconds from the arrival of KV to its proof; after that it is not used, and "
        "the prompt is computed.",
    )
