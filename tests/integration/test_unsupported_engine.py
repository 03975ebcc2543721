"""Models that a technique cannot be done for start, say so once, and are served as if nobody had
asked for it: from prefix cache and store."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import run
from tests.support.forked import told
from tests.support.program import IN_ONE_PROCESS
from tests.support.unsupported_models import BLOCK, MODELS, TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

WHY = {
    "yarn": {"blending": "rope_type 'yarn'", "compression": "rope_type 'yarn'"},
    "longrope": {"blending": "rope_type 'longrope'", "compression": "rope_type 'longrope'"},
    "gemma3": {
        "blending": "sliding window",
        "compression": "sliding window",
        "sparse": "sliding window",
    },
    "granite": {"blending": "GraniteDecoderLayer.forward takes"},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All of them, in one process."""
    folder = tmp_path_factory.mktemp("unsupported")
    run.engine_started()
    found: dict[str, Any] = told("unsupported_models", str(folder), timeout_s=380, **IN_ONE_PROCESS)
    return found


@pytest.mark.parametrize("name", sorted(MODELS))
def test_it_starts_and_tells_which_techniques_it_cannot_do(
    found: dict[str, Any], name: str
) -> None:
    why, wanted = found[name]["why"], WHY[name]
    assert why.keys() == wanted.keys()
    assert all(wanted[technique] in why[technique] for technique in why)
    said = "\n".join(found[name]["said"])
    assert said.count("nothing is reused in this engine") == 1
    keeps = "compression" in wanted and "sparse" not in wanted  # without our attention none drops
    assert said.count("requests keep all KV") == keeps


@pytest.mark.parametrize("name", sorted(MODELS))
def test_requests_that_ask_share_prefix_cache_and_store(found: dict[str, Any], name: str) -> None:
    whole = TOKENS // BLOCK * BLOCK
    assert found[name]["cached"] == [0, whole, whole, whole]
    assert found[name]["stored"] == TOKENS // BLOCK
