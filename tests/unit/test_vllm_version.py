"""An engine of an older vLLM says what to install, and not what it misses."""

from __future__ import annotations

import pytest

from headrace_engine.vllm import check_version


def test_rays_own_image_is_named() -> None:
    with pytest.raises(ImportError, match=r"0\.29\.0 is installed .*make images"):
        check_version("0.29.0")


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.32.1.dev4+cpu", "1.0"])
def test_the_pinned_version_and_later_ones_are_tried(version: str) -> None:
    check_version(version)
