"""Checks of values that are valid one by one but cannot work together.

Each problem is (path of the field, what is wrong and what would be right). The checks run before
anything is started or downloaded. `headrace up` itself checks whether ports are free, because that
changes from one second to the next.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from pathlib import Path
from typing import Any

from headrace.config.calibration import (
    COMPRESSION_FIELD,
    FIELD,
    compression_calibration,
    sparse_calibration,
)
from headrace.config.checks.engine_args import engine_problems
from headrace.config.checks.messages import did_you_mean, quote
from headrace.config.checks.model_names import model_conflicts
from headrace.config.conflicts import Problem, endpoint_conflicts, technique_conflicts
from headrace.config.key_file import read_keys
from headrace.config.machine import cpu_computes_bfloat16
from headrace.config.models import MODEL_SECTIONS
from headrace.config.schema import HeadraceConfig, RoleSettings, RouterSettings
from headrace.config.section import GIB
from headrace_engine.adapters.settings import MAX_ADAPTERS, why_bad_name

OWNED_ENV = {"VLLM_CPU_KVCACHE_SPACE": "kv_cache_gb", "OMP_NUM_THREADS": "threads"}

# Arguments that must be equal in both roles; otherwise one cannot read the other's KV.
SHARED_ENGINE_ARGS = (
    "max_model_len",
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "quantization",
    "revision",
    "tokenizer",
    "hf_overrides",
    "attention_backend",
    "trust_remote_code",
)


def check(
    config: HeadraceConfig, *, files_here: bool = True, wrong: Set[str] = frozenset()
) -> list[Problem]:
    """Return all problems of a configuration whose single values are valid; empty if it can start.

    Args:
        files_here: whether the files that it names should be on this machine.
        wrong: sections with values that were wrong and are left out of `config`. What is compared
            with them is not checked.
    """
    model_checks: list[Check] = [
        (set(), _engine_args),
        (set(), _placement),
        ({"model"}, _adapters),
        ({"techniques", "store"}, lambda c: technique_conflicts(c.techniques, c.store)),
        ({"prefill"}, partial(_role, "prefill")),
        ({"decode"}, partial(_role, "decode")),
        ({"prefill", "decode"}, _roles_agree),
        ({"model", "prefill", "decode"}, _lengths_agree),
        ({"model", "prefill", "decode", "techniques"}, _kv_holds_one_request),
    ]
    app_checks: list[Check] = [
        ({"gateway"}, _port),
        ({"gateway"}, lambda c: endpoint_conflicts(c.gateway)),
        ({"gateway", "model", "models"}, _model_names),
        ({"ray", "prefill", "decode", "models"}, _cpus),
        ({"store"}, _objects),
    ]
    if files_here:
        model_checks += [({"model"}, _model_id), ({"techniques"}, _calibrations)]
        app_checks += [({"gateway"}, _gateway_files)]
    found = []
    for key, model in config.served_models().items():
        if key and "models" in wrong:
            break
        problems = _found(model, model_checks, wrong - set(MODEL_SECTIONS) if key else wrong)
        found += [(f"models.{key}.{where}" if key else where, what) for where, what in problems]
    return found + _found(config, app_checks, wrong)


Check = tuple[set[str], Callable[[HeadraceConfig], Iterable[Problem]]]
"""Sections that a check compares, and the check."""


def _found(config: HeadraceConfig, checks: Iterable[Check], wrong: Set[str]) -> list[Problem]:
    return [p for sections, check in checks if not sections & wrong for p in check(config)]


def _model_names(config: HeadraceConfig) -> Iterator[Problem]:
    models = {key: one.model for key, one in config.served_models().items()}
    ids = {key: model.id for key, model in models.items()}
    adapters = {key: list(model.adapters) for key, model in models.items()}
    yield from model_conflicts(config.gateway, ids, adapters)


def warnings(config: HeadraceConfig) -> list[str]:
    """Return one line for each setting that works but is probably a mistake."""
    lines = []
    if config.ray.address is not None and config.ray.temp_dir is not None:
        lines.append("ray.temp_dir: has no effect if a running cluster is joined (ray.address)")
    for key, model in config.served_models().items():
        source = model.model.source  # a folder may be on other machines only
        if source is not None and (problem := _source_problem(source)):
            lines.append(f"{f'models.{key}.' if key else ''}model.source: {problem}")
    return lines + _object_warnings(config) + _state_warnings(config)


def _engine_args(config: HeadraceConfig) -> Iterator[Problem]:
    for name, role in config.roles().items():
        yield from engine_problems(name, role.engine)


def _adapters(config: HeadraceConfig) -> Iterator[Problem]:
    model = config.model
    for name, source in model.adapters.items():
        if why := why_bad_name(name, model.id):
            yield f"model.adapters.{name}", why
        if why := _adapter_source_problem(source):
            yield f"model.adapters.{name}", why
    if model.adapters_path is not None and (why := _adapter_source_problem(model.adapters_path)):
        yield "model.adapters_path", why
    if len(model.adapters) > MAX_ADAPTERS:
        yield "model.adapters", f"must be at most {MAX_ADAPTERS}, got {len(model.adapters)}"


def _adapter_source_problem(source: str) -> str | None:
    if "://" in source or source.startswith(("/", "~")):
        return None
    return (
        f"must be an absolute path or a URI, got {quote(source)}; write hf://ORG/NAME for a "
        "repository of the Hugging Face hub"
    )


def _placement(config: HeadraceConfig) -> Iterator[Problem]:
    name = config.router.placement
    if name == RouterSettings.model_fields["placement"].default:
        return
    from headrace.router.placement.policies import policy_names

    names = policy_names()
    if name not in names:
        hint = did_you_mean(name, list(names))
        yield "router.placement", f'must be one of {", ".join(names)}; got "{name}"{hint}'


def _model_id(config: HeadraceConfig) -> Iterator[Problem]:
    if config.model.source is None and (problem := _source_problem(config.model.id)):
        yield "model.id", problem


def _source_problem(source: str) -> str | None:
    """Return why `headrace up` on this machine would not find the model; None if it would."""
    from headrace.model.registry import ModelError
    from headrace.model.store import check_source

    try:
        check_source(source)
    except ModelError as error:
        return str(error)
    return None


def _port(config: HeadraceConfig) -> Iterator[Problem]:
    if config.gateway.port is None:
        yield "gateway.port", "is null, but this endpoint needs one; set 0 for any free port"


def _gateway_files(config: HeadraceConfig) -> Iterator[Problem]:
    gateway = config.gateway
    if gateway.api_keys_file is not None:
        try:
            read_keys(Path(gateway.api_keys_file))
        except ValueError as error:
            yield "gateway.api_keys_file", str(error)

    if gateway.tls is not None:
        try:
            gateway.tls.context()
        except ValueError as error:
            yield "gateway.tls_cert_file", str(error)


def _calibrations(config: HeadraceConfig) -> Iterator[Problem]:
    techniques = config.techniques
    try:
        if techniques.sparse.mode != "off":
            sparse_calibration(techniques.sparse)
    except ValueError as error:
        yield FIELD, str(error)
    try:
        if techniques.compression.mode != "off":
            compression_calibration(techniques)
    except ValueError as error:
        yield COMPRESSION_FIELD, str(error)


def _role(name: str, config: HeadraceConfig) -> Iterator[Problem]:
    role = config.roles()[name]
    for variable, owner in OWNED_ENV.items():
        if variable in role.env:
            yield f"{name}.env.{variable}", f"set {name}.{owner} instead"
    yield from _one_machine(name, role)
    yield from _gpus(name, role)


def _lengths_agree(config: HeadraceConfig) -> Iterator[Problem]:
    shared_len = config.model.max_model_len
    for name, role in config.roles().items():
        own_len = role.engine.get("max_model_len")
        if own_len is not None and shared_len is not None and own_len != shared_len:
            yield (
                f"{name}.engine.max_model_len",
                f"is {own_len}, but model.max_model_len is {shared_len}; remove the former",
            )


def _one_machine(name: str, role: RoleSettings) -> Iterator[Problem]:
    """An engine is on one machine: NixlConnector pulls from one pipeline stage (vLLM 0.32), and the
    store's blocks hold the KV of all ranks."""
    for argument in ("pipeline_parallel_size", "nnodes"):
        size = role.engine.get(argument, 1)
        if isinstance(size, int) and size > 1:
            yield (
                f"{name}.engine.{argument}",
                f"must be 1, got {size}: KV is pulled from one pipeline stage, on one machine; "
                "raise engine.tensor_parallel_size and gpus, up to the machine's GPUs",
            )


def _gpus(name: str, role: RoleSettings) -> Iterator[Problem]:
    world = role.world_size
    if role.gpus == 0:
        if world > 1:
            yield (
                f"{name}.gpus",
                f"is 0, but engine.tensor_parallel_size is {world}; set gpus: {world}, or remove "
                "both to run on the CPU",
            )
        if role.accelerator_type is not None:
            yield (
                f"{name}.accelerator_type",
                f'is "{role.accelerator_type}", but {name}.gpus is 0; set gpus, or remove it',
            )
    elif role.gpus != world:
        yield (
            f"{name}.gpus",
            f"is {role.gpus}, but engine.tensor_parallel_size is {world}; set gpus: {world}, or "
            f"engine.tensor_parallel_size: {role.gpus}",
        )


def _roles_agree(config: HeadraceConfig) -> Iterator[Problem]:
    prefill, decode = config.prefill, config.decode
    if (prefill.gpus == 0) != (decode.gpus == 0):
        yield (
            "decode.gpus",
            f"is {decode.gpus}, but prefill.gpus is {prefill.gpus}: KV made on a CPU and on a GPU "
            "has different layouts, so give both roles GPUs or neither",
        )
    for arg in SHARED_ENGINE_ARGS:
        theirs, ours = prefill.engine.get(arg), decode.engine.get(arg)
        if theirs != ours:
            yield (
                f"decode.engine.{arg}",
                f"is {_show(ours)}, but prefill.engine.{arg} is {_show(theirs)}; both roles serve "
                "one model and read each other's KV, so set the same value in both",
            )


def _cpus(config: HeadraceConfig) -> Iterator[Problem]:
    booked, given = config.cpus_booked(), config.ray.num_cpus
    if config.ray.address is None and given is not None and booked > given:
        yield (
            "ray.num_cpus",
            f"is {given}, but the replicas reserve {booked:g} CPUs (replicas x cpus of both "
            "roles); set at least that, or null",
        )


def _kv_holds_one_request(config: HeadraceConfig) -> Iterator[Problem]:
    shape = _describe(config.model.source)
    if shape is None:
        return
    kv_bytes_per_token, model_max_tokens = shape
    techniques = config.techniques
    for name, role in config.roles().items():
        tokens = role.engine.get("max_model_len") or config.model.max_model_len or model_max_tokens
        given = role.kv_cache_bytes
        if given is None or not isinstance(tokens, int):
            continue
        if name == "decode" and techniques.sparse.offload_gib:
            continue  # KV may leave the cache
        # Whole blocks, of 128 tokens on the CPU; each worker holds its share.
        per_token = kv_bytes_per_token * kv_widening(role)
        needed = (tokens + 127) // 128 * 128 * per_token // role.world_size
        if needed > given:
            fits = given * role.world_size // per_token // 128 * 128
            yield (
                f"{name}.kv_cache_gb",
                f"{given / GIB:g} GiB cannot hold one request of {tokens} tokens, which takes "
                f"{needed / GIB:.3g} GiB; set at least {_ceil_gib(needed):g}, or "
                f"model.max_model_len: {fits}",
            )


def _objects(config: HeadraceConfig) -> Iterator[Problem]:
    conversations = config.gateway.conversations
    used = {
        "store.object_url": config.store.object_url if config.store.enabled else None,
        "gateway.conversations.object_url": (
            conversations.object_url if conversations.enabled else None
        ),
    }
    for path, url in used.items():
        if url is None or importlib.util.find_spec("obstore") is not None:
            continue
        yield (
            path,
            f'is "{url}", but its client is not installed; pip install "headrace[object]" here and '
            "on every machine, or set null",
        )


def _object_warnings(config: HeadraceConfig) -> list[str]:
    """Return the options that the object store's client refuses here. These are warnings, because
    each machine of a cluster has its own environment."""
    store = config.store
    if not store.enabled or store.object_url is None or store.object_url.startswith("file:"):
        return []
    from headrace_kvstore.objects.object_client import StoreClient

    try:
        StoreClient(store.object_url, store.object_options, timeout_s=1.0)
    except ValueError as error:
        return [f"store.object_url, with store.object_options and this environment: {error}"]
    return []


def _state_warnings(config: HeadraceConfig) -> list[str]:
    """Return a line if several gateways of a cluster cannot find each other's responses."""
    state = config.gateway.conversations
    if not state.enabled or state.object_url is not None:
        return []
    if config.gateway.replicas == 1 or config.ray.address is None:
        return []
    return [
        "gateway.conversations.object_url: is not set, so gateways on several machines do not "
        "find each other's responses"
    ]


def kv_widening(role: RoleSettings) -> int:
    """Return 2 where the engine keeps KV in 32 bits, else 1: models are described with 16."""
    dtype = role.engine.get("dtype")
    if dtype is None and role.gpus == 0 and not cpu_computes_bfloat16():
        dtype = "float32"
    wide = dtype in ("float32", "float") and role.engine.get("kv_cache_dtype", "auto") == "auto"
    return 2 if wide else 1


def _describe(source: str | None) -> tuple[int, int] | None:
    """Return (KV bytes per token, tokens the model was made for) of a local folder, else None."""
    if source is None or not Path(source).expanduser().is_dir():
        return None
    from headrace.model.facts import describe
    from headrace.model.registry import ModelError

    try:
        shape = describe(Path(source).expanduser())
        return int(shape.kv_bytes_per_token), int(shape.max_model_len)
    except ModelError:  # vLLM itself will say what is wrong with it
        return None


def _ceil_gib(size_bytes: int) -> float:
    """Return a size in GiB, rounded up to two decimals."""
    return -(-size_bytes * 100 // GIB) / 100


def _show(value: Any) -> str:
    return "not set" if value is None else repr(value)
