"""Asks over the network: another machine for its clock, and the model hub for a model."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from headrace_kvstore.protocol.address import host_port

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
HUB = "https://huggingface.co"


def kubernetes_url(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the address of the Kubernetes API in the pod's environment; None outside of a pod."""
    host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return f"https://{host_port(host, port)}/version"


def clock_skew_s(url: str, timeout_s: float = 5.0) -> float:
    """Return the seconds by which this machine's clock is ahead of the HTTP server's, to about half
    a second.

    Nothing secret is sent. A certificate that cannot be checked is accepted: in a pod without a
    service account there is nothing to check it by, and the clock is only compared.

    Raises:
        OSError: no answer; ValueError: an answer without a date.
    """
    context = ssl.create_default_context()
    if ACCOUNT.is_file():
        context.load_verify_locations(str(ACCOUNT))
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        with httpx.Client(verify=context, timeout=timeout_s, trust_env=False) as client:
            before = time.time()
            with client.stream("GET", url) as answer:
                after = time.time()
                date = answer.headers.get("date")
    except httpx.HTTPError as error:
        raise OSError(f"{url}: {error or type(error).__name__}") from None
    if date is None:
        raise ValueError(f"{url} answers without a Date")
    try:
        theirs = parsedate_to_datetime(date).timestamp() + 0.5  # it is cut to whole seconds
    except ValueError:
        raise ValueError(f'{url} answers with the Date "{date[:60]}"') from None
    return (before + after) / 2 - theirs


def hub_token(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the hub token, by huggingface_hub's rules: HF_TOKEN, else the file HF_TOKEN_PATH."""
    if env.get("HF_TOKEN", "").strip():
        return env["HF_TOKEN"].strip()
    file = Path(env.get("HF_TOKEN_PATH") or hub_home(env) / "token")
    try:
        return file.read_text().strip() or None
    except OSError:
        return None


def hub_home(env: Mapping[str, str] = os.environ) -> Path:
    """Return HF_HOME, else huggingface/ in $XDG_CACHE_HOME, else in ~/.cache."""
    if env.get("HF_HOME"):
        return Path(env["HF_HOME"])
    cache = env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "/") / ".cache"
    return Path(cache) / "huggingface"


def hub_cache(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder with the hub's models."""
    return Path(env["HF_HUB_CACHE"]) if env.get("HF_HUB_CACHE") else hub_home(env) / "hub"


def offline(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the hub's client may not use the network."""
    return env.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def hub_answer(name: str, env: Mapping[str, str] = os.environ) -> tuple[int | None, str]:
    """Return (HTTP status of the model's config.json, ""), or (None, why the hub does not answer).

    It asks for the file, because the description of a gated model needs no access.
    """
    endpoint = (env.get("HF_ENDPOINT") or HUB).rstrip("/")
    token = hub_token(env)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{endpoint}/{name}/resolve/main/config.json"
    try:
        answer = httpx.head(url, headers=headers, timeout=10, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return None, f"{endpoint}: {error or type(error).__name__}"
    return answer.status_code, ""
