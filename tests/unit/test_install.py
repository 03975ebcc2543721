"""The installer's decisions: what uv is told of pip's settings, and what a failure is called."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pip_settings_come_from_files_and_are_beaten_by_the_environment(
    install: ModuleType,
) -> None:
    listing = (
        "global.index-url='https://mirror.example/simple'\n"
        "global.find-links='/a /b'\n"
        ":env:.find-links='/c'\n"
        "freeze.timeout='10'\n"
        "noise\n"
    )
    assert install.parse_pip_config(listing) == {
        "index-url": ["https://mirror.example/simple"],
        "find-links": ["/c"],
    }


def test_uv_gets_folders_that_exist_and_indexes_over_http(
    install: ModuleType, tmp_path: Path
) -> None:
    pip = {
        "find-links": [str(tmp_path), str(tmp_path / "gone"), "https://wheels.example/"],
        "index-url": ["https://mirror.example/simple"],
        "extra-index-url": ["file:///somewhere/simple", "https://more.example/simple"],
        "trusted-host": ["mirror.example"],
    }
    assert install.uv_arguments(pip, {}) == [
        "--find-links", str(tmp_path),
        "--find-links", "https://wheels.example/",
        "--default-index", "https://mirror.example/simple",
        "--index", "https://more.example/simple",
        "--index-strategy", "unsafe-best-match",
        "--allow-insecure-host", "mirror.example",
    ]  # fmt: skip


def test_uvs_own_variables_win(install: ModuleType) -> None:
    pip = {"index-url": ["https://mirror.example/simple"], "find-links": ["/"]}
    env = {"UV_DEFAULT_INDEX": "https://other.example", "UV_FIND_LINKS": "/x"}
    assert install.uv_arguments(pip, env) == []


def test_no_index_leaves_only_the_folders(install: ModuleType, tmp_path: Path) -> None:
    pip = {"no-index": ["true"], "find-links": [str(tmp_path)], "index-url": ["https://x.example"]}
    assert install.uv_arguments(pip, {}) == ["--find-links", str(tmp_path), "--no-index"]


def test_certificates_and_timeouts_are_handed_on(install: ModuleType, tmp_path: Path) -> None:
    pip = {"cert": ["/ca.pem"], "timeout": ["180"]}
    env = install.uv_environment(pip, {"HOME": str(tmp_path)})
    assert env["SSL_CERT_FILE"] == "/ca.pem"
    assert env["UV_HTTP_TIMEOUT"] == "180"
    kept = install.uv_environment(pip, {"HOME": str(tmp_path), "SSL_CERT_FILE": "/mine.pem"})
    assert kept["SSL_CERT_FILE"] == "/mine.pem"


@pytest.mark.parametrize(("lock", "torch"), [("dev", True), ("cpu", True), ("gpu", False)])
def test_the_cpu_locks_name_the_cpu_build_of_torch(
    install: ModuleType, lock: str, torch: bool
) -> None:
    found = install.locked_torch((ROOT / "requirements" / f"{lock}.lock").read_text())
    assert (found is not None) == torch
    assert found is None or found.endswith("+cpu")


def test_failures_are_one_line(install: ModuleType) -> None:
    offline = install.why_unresolvable(
        "error: Failed to fetch: `https://mirror.example/simple/ray/`\n  cause: dns error\n"
    )
    assert "https://mirror.example/simple/ray/" in offline
    assert "pip config set global.index-url" in offline
    missing = install.why_unresolvable("error: No solution found\n  cause: no wheels for cp399\n")
    assert missing == "No solution found cause: no wheels for cp399"


def test_a_missing_system_library_is_named_with_its_package(install: ModuleType) -> None:
    wanted = {"libc.so.6": "libc6", "libnowhere.so.9": "libnowhere9"}
    assert install.missing_libraries(wanted) == ["libnowhere.so.9 is missing: install libnowhere9"]


def test_runs_on_no_other_python_than_it_says(install: ModuleType) -> None:
    """The version check stands first and is readable to any Python 3."""
    head = (ROOT / "scripts" / "install.py").read_text().split("import argparse")[0]
    assert "sys.version_info < (3, 11)" in head
    assert sys.version_info >= (3, 11)
