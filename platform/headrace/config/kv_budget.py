"""Puts the plan of `techniques.kv_budget` into a configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headrace.config.calibration import (
    COMPRESSION_FIELD,
    FIELD,
    compression_calibration,
    sparse_calibration,
)
from headrace.config.checks.configuration import kv_widening
from headrace.config.load import ConfigError
from headrace.config.schema import HeadraceConfig
from headrace.config.section import GIB, Section
from headrace.config.techniques import KvBudgetSection
from headrace.model.facts import ModelFacts, describe
from headrace.model.kv_budget import (
    INCREMENTAL_STEP_TOKENS,
    STEP_TOKENS,
    Curve,
    KvBudgetOption,
    KvBudgetPlan,
    KvBudgetRequest,
    plan_kv_budget,
)
from headrace.model.memory_bandwidth import measured_gbps
from headrace.model.registry import ModelError

SECTION = "techniques.kv_budget"


def apply_kv_budget(config: HeadraceConfig) -> tuple[HeadraceConfig, KvBudgetPlan | None]:
    """Return the configuration with the plan's choice in place of the budget, and the plan, if any.

    Args:
        config: `model.source` is a folder.

    Raises:
        ConfigError: the model cannot be read, or nothing keeps to the budget.
    """
    techniques, decode = config.techniques, config.decode
    budget = techniques.kv_budget
    if budget is None:
        return config, None
    try:
        facts = describe(Path(config.model.source or config.model.id).expanduser())
        facts = replace(facts, dtype_bytes=facts.dtype_bytes * kv_widening(decode))
        own = decode.engine.get("max_model_len") or config.model.max_model_len
        request = budget_request(budget, int(own or facts.max_model_len), facts, decode.threads)
        sparse_kl, compression_kl = _measured(config)
        found = plan_kv_budget(
            facts,
            request,
            sparse_kl,
            techniques.sparse.page_tokens,
            _refused(config),
            compression_kl,
        )
        return _with_option(config, found.chosen), found
    except ModelError as error:
        raise ConfigError([f"{SECTION}: {error}"]) from None


def budget_request(
    budget: KvBudgetSection, context_tokens: int, facts: ModelFacts, threads: int = 1
) -> KvBudgetRequest:
    """Return the requirements of an engine.

    Args:
        facts: of its model. threads: number of threads that it computes with.

    Raises:
        ModelError: answers leave no room for prompts, or weights alone take longer than the target.
    """
    read_bytes = None
    if budget.itl_ms is not None:
        gbps = budget.memory_gbps
        per_s = 1e9 * (gbps or measured_gbps(threads, budget.contexts, facts.dtype_bytes))
        weights = (facts.params or 0) * facts.dtype_bytes
        read_bytes = int(budget.itl_ms / 1e3 * per_s) - weights
        if read_bytes <= 0:
            raise ModelError(
                f"itl_ms is {budget.itl_ms:g}: reading the weights alone takes "
                f"{1e3 * weights / per_s:.3g} ms at {per_s / 1e9:.3g} GB/s"
            )
    return KvBudgetRequest(
        budget_bytes=int(budget.gib * GIB),
        contexts=budget.contexts,
        context_tokens=context_tokens,
        answer_tokens=budget.answer_tokens,
        host_bytes=int(budget.host_gib * GIB),
        read_bytes=read_bytes,
    )


def _measured(config: HeadraceConfig) -> tuple[Curve | None, Curve | None]:
    """Return the errors of sparse attention and of compression, by ratio."""
    try:
        sparse = sparse_calibration(config.techniques.sparse)
    except ValueError as error:
        raise ConfigError([f"{FIELD}: {error}"]) from None
    try:
        compressed = compression_calibration(config.techniques)
    except ValueError as error:
        raise ConfigError([f"{COMPRESSION_FIELD}: {error}"]) from None
    return sparse.kl if sparse else None, compressed.kl if compressed else None


def _refused(config: HeadraceConfig) -> dict[str, str]:
    """Return why an engine of this configuration cannot compress or offload contexts."""
    why = ""
    if config.decode.gpus:
        why = "engines on CPUs only"
    elif config.store.enabled and (codec := config.store.engine.get("codec", "raw")) != "raw":
        why = f'the codec "{codec}" does not know the order of its keys'
    refused = dict.fromkeys(("compressed", "incremental", "offloaded"), why)
    if not why and config.techniques.blending.mode != "off":
        why = "techniques.blending corrects KV in the cache"
        refused |= {"incremental": why, "offloaded": why}
    return refused


def _with_option(config: HeadraceConfig, option: KvBudgetOption) -> HeadraceConfig:
    """Return the configuration with this option in place of the budget."""
    techniques, decode = config.techniques, config.decode
    assert techniques.kv_budget is not None
    cache_gib = techniques.kv_budget.gib
    on: dict[str, object] = {"mode": "auto", "keep_ratio": option.keep_ratio}
    changed: dict[str, Section] = {}
    engine = dict(decode.engine)
    if option.name in ("compressed", "incremental"):
        if option.name == "incremental":
            on["incremental"] = True
            engine.setdefault("long_prefill_token_threshold", INCREMENTAL_STEP_TOKENS)
        changed["compression"] = techniques.compression.model_copy(update=on)
    if option.name == "offloaded":
        engine.setdefault("long_prefill_token_threshold", STEP_TOKENS)
        changed["sparse"] = techniques.sparse.model_copy(update=on)
    if option.sizes.host:
        # A byte more: GiB are not exact, and the engine counts whole blocks.
        cache_gib, host_gib = ((size + 1) / GIB for size in (option.sizes.cache, option.sizes.host))
        sparse = changed.get("sparse", techniques.sparse)
        changed["sparse"] = sparse.model_copy(update={"offload_gib": host_gib})
    sized = {"kv_cache_gb": cache_gib, "engine": engine}
    return config.model_copy(
        update={
            "techniques": techniques.model_copy(update=changed | {"kv_budget": None}),
            "decode": decode.model_copy(update=sized),
        }
    )
