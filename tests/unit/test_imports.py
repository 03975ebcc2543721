"""Which package may import which; that no imports run in a circle; that no folder is crowded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "headrace_kvstore": ("kvstore", ()),
    "headrace_engine": ("engine", ("headrace_kvstore",)),
    "headrace_prefill": ("prefill", ("headrace_engine", "headrace_kvstore")),
    "headrace_decode": ("decode", ("headrace_engine", "headrace_kvstore")),
    "headrace": (
        "platform",
        ("headrace_prefill", "headrace_decode", "headrace_engine", "headrace_kvstore"),
    ),
    "headrace_lab": (
        "lab",
        (
            *("headrace", "headrace_prefill", "headrace_decode", "headrace_engine"),
            "headrace_kvstore",
        ),
    ),
}
"""Folder of each package, and the packages that it may import."""
MAX_MODULES = 20
"""In one folder."""
VLLM_ADAPTER, RAY_ADAPTER = "headrace_engine.vllm", "headrace_engine.ray"
PUBLIC_VLLM = {
    *("vllm", "vllm.config", "vllm.exceptions", "vllm.inputs", "vllm.outputs", "vllm.platforms"),
    *("vllm.sampling_params", "vllm.v1.engine.async_llm", "vllm.v1.kv_cache_interface"),
    *(f"vllm.distributed.kv_transfer.kv_connector.v1.{name}" for name in ("base", "metrics")),
}
"""Modules of vLLM that have documented classes: these may be imported outside of the adapter."""
MAX_VLLM_USERS = 21
"""Modules outside of the adapter that import vLLM. Lower it when the number falls."""
PRIVATE_RAY = ("_private", "_internal", "experimental", "_raylet")

TECHNIQUES = (
    *("headrace_decode.sparse", "headrace_decode.compression", "headrace_decode.speculative"),
    *("headrace_prefill.blending", "headrace_prefill.cross_layer"),
)
"""Folders of techniques. What several of them need lies outside of them."""


@cache
def modules() -> dict[str, Path]:
    """Every module of ours, by its dotted name."""
    found = {}
    for package, (folder, _) in PACKAGES.items():
        for path in (ROOT / folder / package).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The imports in a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


@cache
def imports() -> dict[str, set[str]]:
    """Which modules of ours each module names in an import, inside functions and for types too."""
    found: dict[str, set[str]] = {}
    for module, path in modules().items():
        named = found[module] = set()
        for node in statements(path):
            if isinstance(node, ast.Import):
                named.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                base = node.module or ""
                inner = {f"{base}.{alias.name}" for alias in node.names}
                named.update(inner & set(modules()) or {base})
        named &= set(modules())
        named.discard(module)
    return found


@cache
def imports_of_others(package: str) -> dict[str, set[str]]:
    """The modules of another package that each of ours imports, inside functions and for types
    too; modules that import none are left out."""
    found: dict[str, set[str]] = {}
    for module, path in modules().items():
        for node in statements(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            named = {name for name in names if name.split(".")[0] == package}
            if named:
                found.setdefault(module, set()).update(named)
    return found


@cache
def folders_with_folders() -> set[str]:
    """Packages that hold packages."""
    inits = [name for name, path in modules().items() if path.name == "__init__.py"]
    return {name.rpartition(".")[0] for name in inits}


def folder_of(module: str) -> str:
    """The folder that a module lies in. A package's `__init__`, and a module that stands beside
    packages, are rooms of their own."""
    parent = module.rpartition(".")[0]
    alone = modules()[module].name == "__init__.py" or parent in folders_with_folders()
    return module if alone else parent


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other: what is left when all that has no arrow to a node
    that is left, or none from one, is taken away."""
    left = set(arrows)
    while True:
        inner = {
            node
            for node in left
            if left & set(arrows[node]) and any(node in arrows[other] for other in left)
        }
        if inner == left:
            return [sorted(left)] if left else []
        left = inner


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_those_below_it(package: str) -> None:
    allowed = {package, *PACKAGES[package][1]}
    for module, named in imports().items():
        if module.split(".")[0] == package:
            wrong = {name for name in named if name.split(".")[0] not in allowed}
            assert not wrong, f"{module} imports {sorted(wrong)}"


def test_the_kv_store_imports_neither_vllm_nor_ray() -> None:
    for module, path in modules().items():
        if module.split(".")[0] == "headrace_kvstore":
            for node in statements(path):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                wrong = {name for name in names if name.split(".")[0] in ("vllm", "ray")}
                assert not wrong, f"{module} imports {sorted(wrong)}"


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_no_technique_imports_another(technique: str) -> None:
    others = tuple(f"{other}." for other in TECHNIQUES if other != technique)
    mine = [each for each in imports() if f"{each}.".startswith(f"{technique}.")]
    assert mine, "the folder was renamed"
    for module in mine:
        wrong = {name for name in imports()[module] if f"{name}.".startswith(others)}
        assert not wrong, f"{module} imports {sorted(wrong)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_names_no_class_of_a_package_above_it_in_a_string(package: str) -> None:
    above = {*PACKAGES} - {package, *PACKAGES[package][1]}
    for module, path in modules().items():
        if module.split(".")[0] != package:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"\w+(\.\w+){2,}", text):
                assert text.split(".")[0] not in above, f"{module} names {text}"


def test_what_techniques_share_imports_none_of_them() -> None:
    shared = [each for each in imports() if each.startswith("headrace_decode.attention.")]
    assert shared
    for module in shared:
        assert not {name for name in imports()[module] if name.startswith(TECHNIQUES)}, module


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(imports()) == []


def test_no_folders_import_each_other_in_a_circle() -> None:
    arrows: dict[str, set[str]] = {}
    for module, named in imports().items():
        arrows.setdefault(folder_of(module), set()).update(map(folder_of, named))
    for folder, reached in arrows.items():
        reached.discard(folder)
    assert circles(arrows) == []


def test_no_folder_holds_more_modules_than_a_reader_can_hold() -> None:
    folders: dict[Path, int] = {}
    for path in modules().values():
        folders[path.parent] = folders.get(path.parent, 0) + (path.name != "__init__.py")
    crowded = {str(f.relative_to(ROOT)): n for f, n in folders.items() if n > MAX_MODULES}
    assert not crowded


def test_vllms_private_modules_are_imported_in_the_adapter_only() -> None:
    users = {
        module: names
        for module, names in imports_of_others("vllm").items()
        if not f"{module}.".startswith(f"{VLLM_ADAPTER}.")
    }
    private = {m: names - PUBLIC_VLLM for m, names in users.items() if names - PUBLIC_VLLM}
    assert not private
    assert len(users) <= MAX_VLLM_USERS, sorted(users)


def test_rays_private_modules_are_imported_in_the_adapter_only() -> None:
    private = {
        module: sorted(names)
        for module, names in imports_of_others("ray").items()
        if not f"{module}.".startswith(f"{RAY_ADAPTER}.")
        and any(part in PRIVATE_RAY for name in names for part in name.split("."))
    }
    assert not private


def test_the_platform_folder_is_no_package() -> None:
    """A package named `platform` would shadow the standard library's."""
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_a_circle_is_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"], "e": []}) == [["a", "b", "c"]]


def names_in(module: str) -> set[str]:
    """Names at the top level of a module of ours: definitions, assignments and imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
    return found


def dotted_strings() -> Iterator[tuple[str, str]]:
    """(module, string) of each string that has the form of a path to a module or class of ours."""
    form = re.compile(r"(headrace_[a-z]+(\.\w+)+|headrace(\.\w+){2,})(:\w+)?")
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                if form.fullmatch(text) and ".".join(text.split(".")[:2]) in modules():
                    yield module, text


def test_a_path_in_a_string_leads_to_something() -> None:
    lost = []
    for module, text in dotted_strings():
        base, _, name = text.replace(":", ".").rpartition(".")
        if text not in modules() and not (base in modules() and name in names_in(base)):
            lost.append(f"{module}: {text}")
    assert not lost
