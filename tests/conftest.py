"""The app that end-to-end tests share, started at the first test that asks for it; and what holds
for all tests: no process outlives the run, compiled code is kept, the end tells the costs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import compiled, costs, run
from tests.support.app import App, Session
from tests.support.startup import sitecustomize

ENDING_S = 10.0
PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""They end with this process."""

# A busy machine may take any time for an example, and for drawing one.
hypothesis.settings.register_profile(
    "any-machine",
    max_examples=int(os.environ.get("HEADRACE_TEST_EXAMPLES", "50")),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any-machine")


def pytest_configure(config: pytest.Config) -> None:
    run.begin()
    # A shell's background jobs ignore the first, `nohup` the second; children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    compiled.keep_compiled()
    # Two threads of torch that wait for each other on busy cores take a hundred times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ray's workers have niceness 15 otherwise, and get 3 % of a core beside another test.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A killed engine leaves its sockets: here they go with the run.
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(run.folder()))
    # Serve's controller looks ten times a second otherwise, which is a twentieth of a core.
    os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.3")
    # Every call of an actor is told to the node's head otherwise, for a list that nobody reads.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # A Ray node starts as many workers as it has cores otherwise, whether or not they are needed.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    startup = str(Path(sitecustomize.__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [startup, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    config.pluginmanager.register(costs.Meter())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a process of it is still there."""

    def running() -> list[str]:
        found = [run.command(pid) for pid in run.marked(run.MARK, run.begin())]
        return [words for words in found if not any(own in words for own in PYTHONS_OWN)]

    deadline = time.monotonic() + ENDING_S
    while (left := running()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left and session.exitstatus == pytest.ExitCode.OK:
        print("\nerror: still running after the tests:", *left, sep="\n  ", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


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
