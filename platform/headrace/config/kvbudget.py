"""Puts the plan for `techniques.kv_budget` into a configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headrace.config.calibration import BOUNDED_FIELD, FIELD, bounded_calibrated, calibrated
from headrace.config.checks import kv_widening
from headrace.config.load import ConfigError
from headrace.config.schema import HeadraceConfig
from headrace.config.section import GIB, Section
from headrace.config.techniques import KVBudgetSection
from headrace.model.facts import ModelFacts, describe
from headrace.model.kvbudget import (
    STEP_TOKENS,
    STREAM_STEP_TOKENS,
    Asked,
    Curve,
    Plan,
    Way,
    plan,
)
from headrace.model.memory import measured_gbps
from headrace.model.registry import ModelError

SECTION = "techniques.kv_budget"


def planned(config: HeadraceConfig) -> tuple[HeadraceConfig, Plan | None]:
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
        asked = asked_of(budget, int(own or facts.max_model_len), facts, decode.threads)
        units = techniques.sparse.unit_tokens
        sparse_kl, bounded_kl = _measured(config)
        found = plan(facts, asked, sparse_kl, units, _refused(config), bounded_kl)
        return _with(config, found.chosen), found
    except ModelError as error:
        raise ConfigError([f"{SECTION}: {error}"]) from None


def asked_of(
    budget: KVBudgetSection, context_tokens: int, facts: ModelFacts, threads: int = 1
) -> Asked:
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
    return Asked(
        budget_bytes=int(budget.gib * GIB),
        contexts=budget.contexts,
        context_tokens=context_tokens,
        answer_tokens=budget.answer_tokens,
        host_bytes=int(budget.host_gib * GIB),
        read_bytes=read_bytes,
    )


def _measured(config: HeadraceConfig) -> tuple[Curve | None, Curve | None]:
    """Return the error of sparse attention, and of bounded contexts, by share."""
    try:
        sparse = calibrated(config.techniques.sparse)
    except ValueError as error:
        raise ConfigError([f"{FIELD}: {error}"]) from None
    try:
        bounded = bounded_calibrated(config.techniques)
    except ValueError as error:
        raise ConfigError([f"{BOUNDED_FIELD}: {error}"]) from None
    return sparse.kl if sparse else None, bounded.kl if bounded else None


def _refused(config: HeadraceConfig) -> dict[str, str]:
    """Return why an engine of this configuration cannot bound, stream or offload contexts."""
    why = ""
    if config.decode.gpus:
        why = "engines on CPUs only"
    elif config.store.enabled and (codec := config.store.engine.get("codec", "raw")) != "raw":
        why = f'the codec "{codec}" does not know the order of its keys'
    refused = dict.fromkeys(("bounded", "streamed", "offloaded"), why)
    if not why and config.techniques.reuse.mode != "off":
        why = "techniques.reuse corrects KV where it lies in the cache"
        refused |= {"streamed": why, "offloaded": why}
    return refused


def _with(config: HeadraceConfig, way: Way) -> HeadraceConfig:
    """Return the configuration that holds contexts in this way."""
    techniques, decode = config.techniques, config.decode
    assert techniques.kv_budget is not None
    cache_gib = techniques.kv_budget.gib
    on: dict[str, object] = {"mode": "auto", "share": way.share}
    changed: dict[str, Section] = {}
    engine = dict(decode.engine)
    if way.name in ("bounded", "streamed"):
        if way.name == "streamed":
            on["stream"] = True
            engine.setdefault("long_prefill_token_threshold", STREAM_STEP_TOKENS)
        changed["bounded"] = techniques.bounded.model_copy(update=on)
    if way.name == "offloaded":
        engine.setdefault("long_prefill_token_threshold", STEP_TOKENS)
        changed["sparse"] = techniques.sparse.model_copy(update=on)
    if way.sizes.host:
        # A byte more: GiB are not exact, and the engine counts whole blocks.
        cache_gib, host_gib = ((size + 1) / GIB for size in (way.sizes.cache, way.sizes.host))
        sparse = changed.get("sparse", techniques.sparse)
        changed["sparse"] = sparse.model_copy(update={"offload_gib": host_gib})
    sized = {"kv_cache_gb": cache_gib, "engine": engine}
    return config.model_copy(
        update={
            "techniques": techniques.model_copy(update=changed | {"kv_budget": None}),
            "decode": decode.model_copy(update=sized),
        }
    )
