"""The order of the end-to-end tests, which share one app. Faults and its end come last, and behind
them an app of several replicas and gateways, which speaks HTTPS, asks for keys at last, and cannot
draft, which is the default."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from headrace.model import resolve
from tests.support.app import MODEL, App
from tests.support.browser import Browser
from tests.support.certificates import Authority
from tests.support.served import START_S, ServedApp, free_port, tiny_args

HERE = Path(__file__).parent
ORDER = (
    "test_exactness",
    "test_speculation",
    "test_openai_client",
    "test_tools",
    "test_operator",
    "test_console",
    "test_bad_requests",
    "test_hostile_client",
    "test_hang_up",
    "test_rest_face",
    "test_schema",
    "test_store",
    "test_blending",
    "test_conversations",
    "test_batches",
    "test_faults",
    "test_soak",
    "test_down",
    "test_adapters",
    "test_models",
    "test_sparse",
    "test_placement",
    "test_scaling",
    "test_keys",
    "test_pod_network",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of this folder into `ORDER`, behind all other tests."""

    def place(item: pytest.Item) -> int:
        if HERE not in item.path.parents:
            return -1
        return ORDER.index(item.path.stem)

    items.sort(key=place)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The model, fetched at first use."""
    return Path(str(resolve(MODEL)))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Of one file's tests: an open console costs a quarter of a core."""
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture
def client(app: App) -> Iterator[openai.OpenAI]:
    """Of the app that the module's tests ask for; a request that fails is not sent again. It has
    the app's connections: to make others, it would read all certificates of the machine."""
    yield openai.OpenAI(
        base_url=f"{app.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=120,
        http_client=app.client,
    )


@pytest.fixture(scope="module")
def same_replicas(_running_app: App) -> Iterator[None]:
    """No replica dies while the module's tests run."""

    def pids() -> dict[str, int]:
        return {role: _running_app.replica(role)["pid"] for role in ("prefill", "decode")}

    before = pids()
    yield
    assert pids() == before, "a replica was lost on the way"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApp]:
    """Two gateways, two decode and two prefill replicas of a tiny model. Tests leave it changed.
    It speaks HTTPS, and clients that this process makes trust its authority."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    cert, key = authority.issue("server")
    args = tiny_args(free_port())
    args["gateway"] |= {
        "replicas": 2,
        "tls_cert_file": str(cert),
        "tls_key_file": str(key),
        "admission": {"classes": {"quick": {"ttft_target_s": 60}}},
    }
    args["drain_s"] = START_S  # a stream may wait for a replica that starts on a busy machine
    args["techniques"] = {"sparse": {"mode": "request"}, "compression": {"mode": "request"}}
    with ServedApp(args) as app, pytest.MonkeyPatch.context() as environment:
        environment.setenv("SSL_CERT_FILE", str(authority.file))
        yield app
