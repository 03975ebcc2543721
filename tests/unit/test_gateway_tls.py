"""HTTPS at the gateway: which versions, whose certificates, and files that change while it runs."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.cli import client, state, up
from headrace.cli.console import CliError
from headrace.config import ConfigError
from headrace.config import load_config as load
from headrace.config.tls_files import TlsFiles
from headrace.gateway.ingress import connection, tls
from headrace.gateway.ingress.http_server import serve_gateway
from tests.support.certificates import Authority
from tests.unit.gateway_fakes import CHAT, PROMPT, Bench, answer, gateway_over, stream


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def looks_always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tls, "CHECK_INTERVAL_S", 0.0)
    yield


async def status(bench: Bench, **kw: Any) -> int:
    async with bench.client.post(CHAT, json=PROMPT, **kw) as response:
        await response.read()
        return response.status


async def served_name(bench: Bench, authority: Authority) -> str:
    """The name in the certificate that a new connection is shown."""
    url = bench.url.removeprefix("https://").split(":")
    _, writer = await asyncio.open_connection(url[0], int(url[1]), ssl=authority.client())
    subject = writer.get_extra_info("peercert")["subject"]
    writer.close()
    return str(subject[0][0][1])


async def test_a_stream_comes_over_tls(authority: Authority) -> None:
    files = TlsFiles(*authority.issue("server"))
    async with (
        gateway_over(stream, tls=files, client_tls=authority.client()) as bench,
        bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response,
    ):
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert response.headers["strict-transport-security"] == "max-age=31536000"


async def test_a_stop_does_not_wait_for_an_idle_client_to_confirm_the_end(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STOPPING_LINGER_S", 0.1)
    files = TlsFiles(*authority.issue("server"))

    def connect(port: int) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", port), timeout=10)
        return authority.client().wrap_socket(plain, server_hostname="127.0.0.1")

    async with gateway_over(answer, tls=files, client_tls=authority.client()) as bench:
        with await asyncio.to_thread(connect, bench.gateway.port):
            async with asyncio.timeout(15):
                await bench.gateway.stop(grace_s=60)


async def test_plain_http_on_the_tls_port_gets_no_answer(authority: Authority) -> None:
    files = TlsFiles(*authority.issue("server"))
    async with gateway_over(answer, tls=files) as bench, aiohttp.ClientSession() as plain:
        with pytest.raises(aiohttp.ClientError):
            await plain.get(bench.url.replace("https", "http") + "/health")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize(
    ("version", "fits"),
    [
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ],
)
async def test_tls_below_1_2_is_refused(
    authority: Authority, version: ssl.TLSVersion, fits: bool
) -> None:
    own = authority.client()
    own.set_ciphers("ALL:@SECLEVEL=0")
    own.minimum_version = own.maximum_version = version
    async with gateway_over(answer, tls=TlsFiles(*authority.issue("server"))) as bench:
        if fits:
            assert await status(bench, ssl=own) == 200
        else:
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await status(bench, ssl=own)


async def test_with_a_client_authority_only_its_clients_connect(
    authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    files = TlsFiles(*authority.issue("server"), authority.file)
    known = authority.client(authority.issue("client"))
    async with gateway_over(answer, tls=files, client_tls=known) as bench:
        assert await status(bench) == 200
        for stranger in (authority.client(), authority.client(other.issue("stranger"))):
            with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
                await status(bench, ssl=stranger)


@pytest.mark.usefixtures("looks_always")
async def test_a_new_certificate_is_shown_to_new_connections_and_old_ones_go_on(
    authority: Authority,
) -> None:
    cert, key = authority.issue("first")
    async with gateway_over(
        answer, tls=TlsFiles(cert, key), client_tls=authority.client()
    ) as bench:
        assert await status(bench) == 200  # its connection is kept
        assert await served_name(bench, authority) == "first"
        new = authority.issue("second")
        new[0].replace(cert)
        assert await served_name(bench, authority) == "first", (
            "half changed files changed something"
        )
        new[1].replace(key)
        key.touch()
        assert await served_name(bench, authority) == "second"
        assert await status(bench) == 200


@pytest.mark.usefixtures("looks_always")
async def test_an_authority_that_is_taken_away_lets_nobody_in_any_more(
    authority: Authority, tmp_path: Path
) -> None:
    files = TlsFiles(*authority.issue("server"), tmp_path / "clients.pem")
    assert files.client_ca is not None
    files.client_ca.write_bytes(authority.file.read_bytes())
    known = authority.client(authority.issue("client"))
    async with gateway_over(answer, tls=files, client_tls=known) as bench:
        assert await status(bench) == 200
        other = Authority(tmp_path, "other")
        files.client_ca.write_bytes(other.file.read_bytes())
        with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
            await status(bench, ssl=authority.client(authority.issue("client")))
        assert await status(bench, ssl=authority.client(other.issue("new"))) == 200


@pytest.mark.usefixtures("looks_always")
@pytest.mark.parametrize("spoil", ["gone", "garbage", "another key"])
async def test_files_that_are_no_use_change_nothing(authority: Authority, spoil: str) -> None:
    cert, key = authority.issue("first")
    async with gateway_over(answer, tls=TlsFiles(cert, key)) as bench:
        if spoil == "gone":
            cert.unlink()
        elif spoil == "garbage":
            cert.write_text("garbage")
        else:
            authority.issue("other")[1].replace(key)
        assert await served_name(bench, authority) == "first"


async def test_a_gateway_does_not_start_with_files_that_are_no_use(
    authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("server")
    for files in (TlsFiles(cert, tmp_path / "none"), TlsFiles(key, cert), TlsFiles(cert, key, key)):
        with pytest.raises(ValueError, match=str(tmp_path)):
            await serve_gateway(None, "127.0.0.1", 0, tls=files)


def test_the_configuration_names_the_file_that_is_no_use(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.issue("server")
    file = tmp_path / "headrace.yaml"
    file.write_text("gateway: {tls_cert_file: server.crt, tls_key_file: server.key}\n")
    assert load(file).gateway.tls == TlsFiles(tmp_path / "server.crt", tmp_path / "server.key")
    monkeypatch.chdir(tmp_path)
    given = ["gateway.tls_cert_file=server.crt", "gateway.tls_key_file=server.key"]
    assert load(None, overrides=given).gateway.tls == load(file).gateway.tls
    (tmp_path / "server.key").unlink()
    with pytest.raises(ConfigError, match=r"gateway.tls_cert_file: .*server.key cannot be read"):
        load(file)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tls_cert_file": "x"}, "need each other"),
        ({"tls_client_ca_file": "x"}, "needs tls_cert_file"),
        ({"tls_cert_file": "x", "tls_key_file": "y", "port": "null"}, "no port of its own"),
        ({"body_budget_bytes": "1000"}, "one body may have"),
    ],
)
def test_settings_that_cannot_hold_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(None, overrides=[f"gateway.{name}={value}" for name, value in given.items()])


def test_client_certificates_close_an_endpoint_as_keys_do(authority: Authority) -> None:
    cert, key = authority.issue("server")
    given = {"host": "0.0.0.0", "tls_cert_file": cert, "tls_key_file": key}
    with pytest.raises(ConfigError, match="without API keys"):
        load(None, overrides=[f"gateway.{k}={v}" for k, v in given.items()])
    given["tls_client_ca_file"] = authority.file
    load(None, overrides=[f"gateway.{k}={v}" for k, v in given.items()])


async def test_commands_trust_exactly_the_certificate_of_their_instance(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEADRACE_CA_FILE", "HEADRACE_CLIENT_CERT"):
        monkeypatch.delenv(name, raising=False)
    cert, key = authority.issue("server")
    other, _ = authority.issue("other")
    async with gateway_over(answer, tls=TlsFiles(cert, key)) as bench:

        def version(own: Path, **environment: str) -> Any:
            for name, value in environment.items():
                monkeypatch.setenv(name, value)
            instance = state.Instance("x", "t", endpoint=bench.url, tls_cert_file=str(own))
            return client.get_json(instance, "/version")

        assert "version" in await asyncio.to_thread(version, cert)
        with pytest.raises(CliError, match="does not answer"):
            await asyncio.to_thread(version, other)
        ca = str(authority.file)
        assert "version" in await asyncio.to_thread(version, other, HEADRACE_CA_FILE=ca)
        with pytest.raises(CliError, match="/none: cannot be used for TLS"):
            await asyncio.to_thread(version, cert, HEADRACE_CLIENT_CERT="/none")


def test_a_start_that_could_not_ask_its_endpoint_says_so_first(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_CLIENT_CERT", raising=False)
    cert, key = authority.issue("server")
    given = {"tls_cert_file": cert, "tls_key_file": key, "tls_client_ca_file": authority.file}
    config = load(None, overrides=[f"gateway.{k}={v}" for k, v in given.items()])
    with pytest.raises(CliError, match="HEADRACE_CLIENT_CERT"):
        up.up(config, name="x", detach=True, timeout_s=1)


async def test_commands_show_the_client_certificate_that_they_are_given(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = authority.issue("server")
    shown = tmp_path / "shown.pem"
    shown.write_bytes(b"".join(file.read_bytes() for file in authority.issue("client")))
    monkeypatch.delenv("HEADRACE_CA_FILE", raising=False)
    async with gateway_over(answer, tls=TlsFiles(cert, key, authority.file)) as bench:
        instance = state.Instance("x", "t", endpoint=bench.url, tls_cert_file=str(cert))
        with pytest.raises(CliError):
            await asyncio.to_thread(client.get_json, instance, "/version")
        monkeypatch.setenv("HEADRACE_CLIENT_CERT", str(shown))
        assert "version" in await asyncio.to_thread(client.get_json, instance, "/version")
