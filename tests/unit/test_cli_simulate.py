"""`headrace simulate --calibrate`: the fits of a file, or of a running app that asks for a key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.cli.console import CliError
from headrace.cli.simulate.command import _fits
from headrace.config.key_file import hash_of
from tests.unit.gateway_fakes import answer, gateway_over

ROOT = {"admin_key_hash": hash_of(b"operator-key")}


@pytest.mark.parametrize("path", ["", "/", "/headrace/v1/status"])
async def test_the_fits_of_an_app_with_keys_take_the_key_of_the_environment(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "operator-key")
    async with gateway_over(answer, **ROOT) as bench:
        assert "replicas" in await asyncio.to_thread(_fits, bench.url + path)


async def test_without_the_key_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    async with gateway_over(answer, **ROOT) as bench:
        with pytest.raises(CliError, match=r"--calibrate .*set HEADRACE_API_KEY"):
            await asyncio.to_thread(_fits, bench.url)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"--calibrate .*missing"):
        _fits(str(tmp_path / "missing"))
