"""`headrace model check-kv`: prints the size of a model's KV, also under other attention kinds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from headrace import model as models
from headrace.cli.console import CliError, human_bytes, stdout
from headrace.model.facts import ModelFacts
from headrace.model.kv_size import KvSize, kv_sizes

GIB = 1 << 30


def check_kv(
    source: str,
    *,
    gpu_memory_gib: float,
    gpu_share: float,
    context: int | None,
    block_tokens: int,
    as_json: bool,
) -> None:
    """Print the table. CliError if the configuration does not tell, or the weights do not fit."""
    try:
        facts = _facts(source)
        weights = (facts.params or 0) * facts.dtype_bytes
        memory = int(gpu_memory_gib * GIB * gpu_share) - weights
        if memory <= 0:
            raise CliError(
                f"the weights take {human_bytes(weights)}, more than {gpu_share:g} of "
                f"{gpu_memory_gib:g} GiB: name more with --gpu-memory"
            )
        tokens = context or facts.max_model_len
        sizes = kv_sizes(facts, memory, tokens, block_tokens)
    except models.ModelError as error:
        raise CliError(str(error)) from None
    if as_json:
        found = {
            "architecture": facts.architecture,
            "weights_bytes": weights or None,
            "kv_memory_bytes": memory,
            "context_tokens": tokens,
            "block_tokens": block_tokens,
            "rows": [asdict(size) for size in sizes],
        }
        print(json.dumps(found, indent=2))
        return
    known = f"beside weights of {human_bytes(weights)}" if weights else "if weights took nothing"
    print(
        f"{facts.architecture}: {facts.layers} layers, {facts.heads} heads of {facts.channels}; "
        f"{human_bytes(memory)} for KV {known}; contexts of {tokens} tokens, blocks of "
        f"{block_tokens}"
    )
    stdout().print(_table(sizes))
    print("int4 is the KV store's: an engine decodes it at loading.")


def _facts(source: str) -> ModelFacts:
    """Return the facts of a config.json, or of a folder or model that `resolve` knows."""
    path = Path(source).expanduser()
    if path.is_file():
        path = path.parent if path.name == "config.json" else path
    if path.is_file():
        raise CliError(f"{path} is no config.json: name one, or a model folder")
    return models.describe(path if path.is_dir() else models.resolve(source))


def _table(sizes: list[KvSize]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("KV", "layers", "a token", "a block", "a context", "blocks", "contexts"):
        table.add_column(column, justify="left" if column == "KV" else "right")
    for size in sizes:
        table.add_row(
            size.name,
            str(size.kv_layers),
            human_bytes(size.bytes_per_token),
            human_bytes(size.bytes_per_block),
            human_bytes(size.context_bytes),
            str(size.blocks),
            str(size.contexts),
        )
    return table
