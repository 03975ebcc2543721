"""The offline bundle: a lock's packages for a machine, in pieces that an installer joins."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
HERE = ".".join(map(str, sys.version_info[:2]))


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


script("bundle_install")
bundle = script("bundle")
TARGET = bundle.Target("3.12", "x86_64", "2.31")


class TestPins:
    def test_are_those_of_the_machine(self) -> None:
        lock = (
            "av==18.1.0 ; python_full_version < '3.12'\n"
            "av==19.0.2 ; python_full_version >= '3.12'\n"
            "    # via vllm\n"
            "pywin32==312 ; sys_platform == 'win32'\n"
            "torch==2.13.0  # a comment\n"
        )
        assert bundle.pins(lock, TARGET) == ["av===19.0.2", "torch===2.13.0"]

    def test_leave_out_what_the_machine_has(self) -> None:
        lock = "nvidia-cublas==13.1\nnumpy==2.3.5\ntorch==2.13.0\n"
        assert bundle.pins(lock, TARGET, ["nvidia-*", "torch"]) == ["numpy===2.3.5"]

    def test_the_gpu_lock_has_a_version_of_each_package_for_a_machine(self) -> None:
        found = bundle.pins((ROOT / "requirements" / "gpu.lock").read_text(), TARGET)
        names = [pin.partition("===")[0] for pin in found]
        assert {"vllm", "torch", "nixl", "ray"} <= set(names)
        assert len(set(names)) == len(names)
        assert not any("+" in pin for pin in found), "a CPU's build"


class TestPieces:
    @given(
        contents=st.lists(st.binary(max_size=300), min_size=1, max_size=6),
        size=st.integers(1, 200),
    )
    def test_put_together_are_the_files(
        self, contents: list[bytes], size: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder, out = (tmp_path_factory.mktemp(name) for name in ("files", "out"))
        paths = [folder / f"file{n}" for n in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        pieces = bundle.split(paths, out, size)
        parts = [(out / piece["name"]).read_bytes() for piece in pieces]
        assert b"".join(parts) == b"".join(contents)
        assert [len(part) for part in parts] == [piece["bytes"] for piece in pieces]
        assert all(len(part) == size for part in parts[:-1])
        assert sorted(path.name for path in out.iterdir()) == [piece["name"] for piece in pieces]

    def test_select_names_the_wheel_that_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "torch-2.13.0+cpu-cp312-cp312-linux_x86_64.whl").touch()
        with pytest.raises(SystemExit, match=r"has no wheel of torch===2\.13\.0"):
            bundle.select(["torch===2.13.0"], tmp_path)


@pytest.mark.parametrize("text", ["3", "3.12.1", "three.one", ""])
def test_a_version_has_two_numbers(text: str) -> None:
    assert bundle.version("3.12") == "3.12"
    with pytest.raises(argparse.ArgumentTypeError, match="must be two numbers"):
        bundle.version(text)


def wheel(folder: Path, name: str, filler: int = 0) -> Path:
    """A package with one module."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"NAME = {name!r}\n" + "#" * filler)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A bundle of two packages in three pieces, for this machine."""
    out, wheels = tmp_path / "bundle", tmp_path / "wheels"
    wheels.mkdir()
    paths = [wheel(wheels, "headrace_one", 1_500_000), wheel(wheels, "headrace_two", 600_000)]
    target = bundle.Target(HERE, platform.machine(), "2.17")
    bundle.write_bundle(paths, target, "some.lock", out, 1)
    assert len(list(out.glob("piece-*"))) == 3
    return out


def run(folder: Path, *words: str) -> tuple[int, str]:
    """The installer's status and output."""
    command = [sys.executable, str(folder / "install.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


class TestInstaller:
    def test_installs_without_a_network(self, made: Path, tmp_path: Path) -> None:
        target = tmp_path / "site"
        assert run(made, "--check") == (0, "3 pieces are whole\n")
        code, output = run(made, "--target", str(target))
        assert code == 0 and "2 packages are installed" in output
        assert (target / "headrace_two.py").exists()
        assert sorted(path.name[:6] for path in made.iterdir() if path.is_dir()) == []

    def test_names_missing_and_damaged_pieces(self, made: Path) -> None:
        (made / "piece-0000").unlink()
        content = bytearray((made / "piece-0001").read_bytes())
        content[1000] ^= 1
        (made / "piece-0001").write_bytes(content)
        (made / "piece-0002").write_bytes(b"short")
        code, output = run(made, "--check")
        assert code == 1
        assert "piece-0000 is missing; piece-0001 is damaged; piece-0002 has 5 bytes" in output

    def test_compares_the_manifest_with_the_digest_that_is_given(self, made: Path) -> None:
        digest = bundle.digest(made / "manifest.json")
        assert run(made, "--check", "--manifest-sha256", digest)[0] == 0
        code, output = run(made, "--check", "--manifest-sha256", "0" * 64)
        assert code == 1 and "manifest.json is another one" in output

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"python": "3.2"}, "the bundle is for Python 3.2"),
            ({"machine": "s390x"}, "the bundle is for s390x"),
            ({"glibc": "9.99"}, "the bundle needs glibc 9.99"),
            ({"format": 2}, "format must be 1"),
            ({"pieces": None}, "pieces: must be a list"),
            ({"wheels": [{"name": "../x.whl"}]}, "wheels[0].bytes: must be int"),
            (
                {"wheels": [{"name": "../x.whl", "bytes": 1, "sha256": ""}]},
                "wheels[0].name: must be the name of a file",
            ),
        ],
    )
    def test_refuses_a_manifest_that_does_not_fit(
        self, made: Path, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        path = made / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        code, output = run(made, "--target", str(tmp_path / "site"))
        assert code == 1 and message in output
        assert not (tmp_path / "site").exists()
