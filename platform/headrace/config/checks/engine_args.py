"""The check of `prefill.engine` and `decode.engine`: names and types of vLLM's arguments."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace.config.checks.messages import did_you_mean, quote

OWNED_ENGINE_ARGS = {
    "model": "model.source",
    "served_model_name": "model.id",
    "kv_cache_memory_bytes": "kv_cache_gb",
}
"""Engine arguments that another field of the file sets, and that field."""
KINDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("true or false", (bool,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "str": ("text", (str,)),
}
"""The types that are checked: the words for each, and the classes of its values."""


@lru_cache(maxsize=1)
def vllm_engine_args() -> Mapping[str, str]:
    """Read vLLM's engine and server arguments, and the type of each, in its source: importing takes
    seconds.

    Ray sorts both kinds out of one mapping. The result is empty if vLLM is not installed here or
    has moved them; then nothing is refused.
    """
    trees: list[ast.Module] = []
    try:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            return {}
        for file in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py"):
            source = Path(spec.submodule_search_locations[0]) / file
            trees.append(ast.parse(source.read_text("utf-8")))
    except (ImportError, OSError, SyntaxError, ValueError):
        return {}
    return {
        field.target.id: ast.unparse(field.annotation)
        for node in (node for tree in trees for node in tree.body)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("EngineArgs", "FrontendArgs"))
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def engine_problems(role: str, engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (path, problem) for each argument that vLLM does not have or another field sets, and
    for each value of a wrong type.

    vLLM judges null, and values that are not plain numbers, texts or truth values.
    """
    known = vllm_engine_args()
    for arg, value in engine.items():
        path = f"{role}.engine.{arg}"
        if owner := OWNED_ENGINE_ARGS.get(arg):
            owner = owner if "." in owner else f"{role}.{owner}"
            yield path, f"set {owner} instead"
        elif arg in ("tensor_parallel_size", "pipeline_parallel_size") and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            yield path, f"must be a whole number >= 1, got {quote(value)}"
        elif known and arg not in known:
            yield path, f"vLLM has no such engine argument{did_you_mean(arg, sorted(known))}"
        elif value is not None and (kind := KINDS.get(known.get(arg, "").removesuffix(" | None"))):
            words, classes = kind
            if not isinstance(value, classes) or (isinstance(value, bool) and bool not in classes):
                yield path, f"must be {words}, got {quote(value)}"
