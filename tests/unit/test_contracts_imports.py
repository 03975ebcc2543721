"""Every name that our code imports from vLLM is there, also if a function imports it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("platform", "engine", "decode", "prefill", "kvstore", "lab", "benchmarks", "tests")
CUDA_ONLY = {("vllm.v1.attention.backends.fa_utils", "flash_attn_varlen_func")}


def imports() -> Iterator[tuple[Path, str, str]]:
    """Each file, module of vLLM and name."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                if module.partition(".")[0] == "vllm":
                    yield from ((file, module, name.name) for name in node.names)


def is_there(module: str, name: str) -> bool:
    if importlib.util.find_spec(module) is None:
        return False
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


def test_each_is_there() -> None:
    found = list(imports())
    assert len(found) > 100
    for file, module, name in found:
        if (module, name) not in CUDA_ONLY:
            assert is_there(module, name), f"{module}.{name} is gone: mend {file.relative_to(ROOT)}"
