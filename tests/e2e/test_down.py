"""`headrace down` leaves nothing: no process, no file in /dev/shm. Runs behind all that share the
app."""

from __future__ import annotations

import pytest

from tests.support.app import Session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_down_leaves_no_process_and_no_shared_memory(app_session: Session) -> None:
    if app_session.app is None:
        pytest.skip("no test of this run started the app")
    left = app_session.stop()
    assert not left, "\n".join(left)
    assert not list(app_session.folder.glob("hr-*")), "the node's folder is still there"
    assert not list((app_session.folder / "state").glob("*.json")), "it is still remembered"
    assert app_session.down_s is not None and app_session.down_s < 60
