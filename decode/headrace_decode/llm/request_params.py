"""Changes a request's prompt and parameters, in vLLM's types, before the engine gets them."""

from __future__ import annotations

import copy
from typing import Any

from vllm import RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from headrace_decode.resume.scheduler import RESUME_TOKENS
from headrace_decode.speculative.request_info import request_arguments
from headrace_decode.speculative.tenant_policies import TenantPolicy
from headrace_decode.techniques import (
    PARTIAL_KV,
    LossyMode,
    TechniqueError,
    salt_with_technique,
)
from headrace_engine.connector.identity.engine_identity import lossy_codec
from headrace_engine.kv_transfer.handoff import PARAMS_KEY, pull_params
from headrace_engine.vllm.structured_output import set_chosen_backend
from headrace_kvstore.identity.salts import tenant_salt

RESERVED = frozenset({PARAMS_KEY, "ec_transfer_params", RESUME_TOKENS, "kv_cache_report_mode"})
"""Arguments that no client may give: they are internal, name memory of an engine or encoder, or
have vLLM report blocks as stored that it already holds."""

GRAMMAR_FIELDS = (
    *("json", "regex", "choice", "grammar", "json_object", "structural_tag"),
    *("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"),
)
"""Fields of vLLM's `StructuredOutputsParams` that define a grammar."""


def with_tenant(prompt: Any, tenant: str | None) -> Any:
    """Return the prompt with its tenant's cache salt, or unchanged if there are no tenants.

    Args:
        prompt: the prompt as vLLM renders it.
        tenant: the tenant; None without tenants.

    Raises:
        TypeError: the prompt has no place for a salt, so all tenants would share its KV.
    """
    if tenant is None:
        return prompt
    if not isinstance(prompt, dict):
        raise TypeError(f"a prompt of type {type(prompt).__name__} cannot carry a cache salt")
    return {**prompt, "cache_salt": tenant_salt(tenant, prompt.get("cache_salt") or "")}


def with_technique(prompt: Any, params: SamplingParams, lossy: str) -> Any:
    """Return the prompt with the cache salt that its request's techniques need (`techniques`).

    Raises:
        VLLMValidationError: a field for techniques is invalid.
        TypeError: the prompt has no place for a salt.
    """
    salt = (prompt.get("cache_salt") if isinstance(prompt, dict) else None) or ""
    try:
        wanted = salt_with_technique(salt, params.extra_args, lossy)
    except TechniqueError as error:
        raise VLLMValidationError(str(error), parameter=error.param) from None
    if wanted == salt:
        return prompt
    if not isinstance(prompt, dict):
        raise TypeError(f"a prompt of type {type(prompt).__name__} cannot carry a cache salt")
    return {**prompt, "cache_salt": wanted}


def with_keep_ratio(params: SamplingParams, lossy_mode: LossyMode | None) -> SamplingParams:
    """Return the parameters with the request's keep ratio for the engine.

    The engine reads the ratio with `techniques.keep_ratio_in`. Without sparse attention or
    compression the fields are removed.
    """
    extra = {
        name: value for name, value in (params.extra_args or {}).items() if name not in PARTIAL_KV
    }
    if lossy_mode is not None:
        extra[lossy_mode.technique] = lossy_mode.keep_ratio
    elif len(extra) == len(params.extra_args or {}):
        return params
    changed = copy.copy(params)
    changed.extra_args = extra
    return changed


def lossy_store_of(vllm_config: VllmConfig) -> str:
    """Return `store=CODEC` if the engine's store is lossy, for `techniques`; else an empty text."""
    codec = lossy_codec(vllm_config.kv_transfer_config)
    return f"store={codec}" if codec else ""


def grammar_of(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request's grammar that are set."""
    wanted = params.structured_outputs
    fields = {name: getattr(wanted, name) for name in GRAMMAR_FIELDS}
    return {name: value for name, value in fields.items() if value not in (None, False)} or {
        "json_object": wanted.json_object
    }


def with_grammar(params: SamplingParams, tried: dict[str, Any]) -> SamplingParams:
    """Return a copy of `params` with the grammar of a trial (`grammars.worker.Compiler`)."""
    changed = copy.copy(params)
    changed.structured_outputs = StructuredOutputsParams(**tried["spec"])
    set_chosen_backend(changed.structured_outputs, tried["backend"], tried["automatic"])
    return changed


def grammar_failed(output: RequestOutput, params: SamplingParams) -> bool:
    """Return whether a request ended because the engine could not use its grammar.

    This is the client's error and not the server's.
    """
    return params.structured_outputs is not None and any(
        choice.finish_reason == "error" for choice in output.outputs
    )


def without_reserved(params: SamplingParams) -> SamplingParams:
    """Drop the arguments that no client may give."""
    if not params.extra_args or RESERVED.isdisjoint(params.extra_args):
        return params
    cleaned = copy.copy(params)
    cleaned.extra_args = {k: v for k, v in params.extra_args.items() if k not in RESERVED}
    return cleaned


def with_drafting_facts(
    params: SamplingParams, salt: str | None, policy: TenantPolicy, itl_s: float | None = None
) -> SamplingParams:
    """Return a copy of `params` with the facts that the engine's drafter needs.

    These are the request's tenant, its drafting policy and the target seconds between its tokens.
    Tokens are not drafted for a request with a seed: verifying drafts draws other random numbers,
    so the same seed would not repeat its sample.
    """
    changed = copy.copy(params)
    changed.extra_args = request_arguments(
        params.extra_args,
        tenant=salt or "",
        itl_s=itl_s,
        drafts=policy.draft and params.seed is None,
        keeps=policy.keep,
    )
    return changed


def with_transfer_params(params: SamplingParams, kv_params: dict[str, Any]) -> SamplingParams:
    """Return a copy of `params` with which the engine pulls KV."""
    pulling = copy.copy(params)
    pulling.extra_args = {**(params.extra_args or {}), PARAMS_KEY: pull_params(kv_params)}
    return pulling
