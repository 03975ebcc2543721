"""The app that end-to-end tests share: started once, at the first test that asks for it; and what
holds for all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.app import App, Session

ROOT = Path(__file__).parents[1]


def pytest_configure() -> None:
    """Forget compiled code that is older than a source.

    numba keeps a function's code until that function's own file changes, with all that was
    compiled into it from other files.
    """
    for package in ("decode", "engine", "kvstore"):
        newest_s = max(path.stat().st_mtime for path in (ROOT / package).rglob("*.py"))
        for kept in (ROOT / package).rglob("*.nb[ci]"):
            if kept.stat().st_mtime < newest_s:
                kept.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def app_session() -> Iterator[Session]:
    """The session's one app, not yet started."""
    session = Session()
    yield session
    session.clean()


@pytest.fixture(scope="session")
def _running_app(app_session: Session) -> App:
    app = app_session.start()
    print(f"\nheadrace was ready after {app_session.start_s:.0f} s", file=sys.stderr)
    return app


@pytest.fixture
def app(_running_app: App, request: pytest.FixtureRequest) -> Iterator[App]:
    """The running app; a failing test shows the last lines of its logs."""
    yield _running_app
    failed = getattr(request.node, "failed_call", False)
    if failed:
        print(_running_app.logs(), file=sys.stderr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Tell fixtures whether the test failed."""
    report = yield
    if report.when == "call" and report.failed:
        item.failed_call = True  # type: ignore[attr-defined]
    return report
