"""Finds the running instance that a command is about, and calls its HTTP endpoint.

An instance of this machine is known by its state file. `HEADRACE_URL` names an app that runs
elsewhere, in a Kubernetes cluster for instance; `HEADRACE_API_KEY` is then the key to show it.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from headrace.cli import state
from headrace.cli.console import CliError


class NotFoundError(CliError):
    """The endpoint answered 404."""


def running_instance(name: str | None) -> state.Instance:
    """Return the instance called `name`; without a name, the app at `HEADRACE_URL`, or the only
    instance of this machine that is running.

    Raises:
        CliError: there is none, or several and no name was given.
    """
    if name is None and (url := os.environ.get("HEADRACE_URL")):
        return _elsewhere(url)
    if name is not None:
        try:
            found = state.load(name)
        except ValueError as error:
            raise CliError(str(error), 2) from None
        if found is None or not found.running():
            raise CliError(
                f'no instance called "{name}" is running; start it with: headrace up --name {name}'
            )
        return found
    alive = [i for i in state.instances() if i.running()]
    if not alive:
        raise CliError(
            "nothing is running; start it with headrace up, or set HEADRACE_URL to an app elsewhere"
        )
    if len(alive) > 1:
        names = ", ".join(i.name for i in alive)
        raise CliError(f"several instances are running ({names}); choose one with --name", 2)
    return alive[0]


def _elsewhere(url: str) -> state.Instance:
    """Return the app at a URL, with the model that it reports.

    Raises:
        CliError: this is no URL, or no app of ours answers there.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise CliError(f'HEADRACE_URL must be like "http://HOST:PORT", got "{url}"', 2)
    endpoint = url.rstrip("/").removesuffix("/v1")
    instance = state.Instance(endpoint, "", phase="HEADRACE_URL", endpoint=endpoint)
    index = get_json(instance, "/")
    if not isinstance(index, dict) or index.get("name") != "headrace":
        raise CliError(f"HEADRACE_URL: what answers at {endpoint} is not Headrace")
    instance.model = str(index.get("model"))
    return instance


def api_key(instance: state.Instance) -> str | None:
    """Return `HEADRACE_API_KEY`, else a key of the instance's configuration, else None."""
    return os.environ.get("HEADRACE_API_KEY") or instance.api_key


def headers(instance: state.Instance) -> dict[str, str]:
    """Return the Authorization header, if there is a key."""
    key = api_key(instance)
    return {"Authorization": f"Bearer {key}"} if key else {}


def get_json(instance: state.Instance, path: str, timeout_s: float = 15.0) -> Any:
    """Return the JSON that the endpoint answers for a path.

    Raises:
        CliError: as `call`.
    """
    return call(instance, "GET", path, timeout_s=timeout_s)


def find_json(instance: state.Instance, path: str) -> Any:
    """Return the JSON that the endpoint answers for a path; None if it answers 404.

    Raises:
        CliError: as `call`, for other answers.
    """
    try:
        return get_json(instance, path)
    except NotFoundError:
        return None


def call(
    instance: state.Instance,
    method: str,
    path: str,
    body: Any = None,
    query: dict[str, str] | None = None,
    timeout_s: float = 15.0,
) -> Any:
    """Return the JSON that the endpoint answers; `body` is sent as JSON where there is one.

    Raises:
        NotFoundError: it answered 404.
        CliError: it cannot be reached or refuses; with the remedy where there is one.
    """
    url = instance.endpoint + path
    try:
        # trust_env=False: requests to this machine must not go through a proxy.
        answer = httpx.request(
            method,
            url,
            json=body,
            params=query,
            headers=headers(instance),
            timeout=timeout_s,
            trust_env=False,
            verify=trust(instance),
        )
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise CliError(
            f'"{instance.name}" ({instance.phase}) does not answer at {instance.endpoint}: {reason}'
        ) from None
    if answer.status_code == 401:
        raise CliError("the endpoint asks for an API key; set HEADRACE_API_KEY")
    if answer.status_code != 200:
        kind = NotFoundError if answer.status_code == 404 else CliError
        raise kind(_said(answer) or f"{url} answered {answer.status_code}: {answer.text[:200]}")
    try:
        return answer.json()
    except ValueError:
        raise CliError(f"{url} did not answer JSON") from None


def _said(answer: httpx.Response) -> str | None:
    """Return the message of an error in OpenAI's format; None if the answer is not one."""
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return None
    return message if isinstance(message, str) else None


def trust(instance: state.Instance) -> ssl.SSLContext | bool:
    """Return how to verify the endpoint, with the certificate to show it; True for plain HTTP.

    With `HEADRACE_CA_FILE`, the endpoint needs a certificate for its host from that authority. Else
    it needs exactly the certificate that the instance was started with, for any names. An app
    elsewhere then needs one that this system trusts.

    Raises:
        CliError: a file cannot be used.
    """
    if not instance.endpoint.startswith("https:"):
        return True
    authority, own = os.environ.get("HEADRACE_CA_FILE"), os.environ.get("HEADRACE_CLIENT_CERT")
    file = authority or instance.tls_cert_file or ""
    try:
        if authority or not file:
            made = ssl.create_default_context(cafile=authority)
        else:
            made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            made.check_hostname = False
            made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            made.load_verify_locations(cadata=_first_certificate(Path(file).read_text()))
        if own:
            file = own
            made.load_cert_chain(own)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise CliError(f"{file}: cannot be used for TLS: {error}") from None
    return made


def _first_certificate(text: str) -> str:
    """Return the server's own certificate: those after it vouch for other servers, too."""
    end = "-----END CERTIFICATE-----"
    return text[: text.index(end) + len(end)]


def is_healthy(endpoint: str, headers: dict[str, str], trust: ssl.SSLContext | bool = True) -> bool:
    """Whether the endpoint serves requests."""
    try:
        answer = httpx.get(
            endpoint + "/health", headers=headers, timeout=5.0, trust_env=False, verify=trust
        )
    except httpx.HTTPError:
        return False
    return answer.status_code == 200
