"""Asks over the network: another machine for its clock, and the model hub for a model."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx

from headrace.model.room import room_bytes
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
    url, headers = _hub_request(f"{name}/resolve/main/config.json", env)
    try:
        answer = httpx.head(url, headers=headers, timeout=10, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return None, f"{_endpoint(env)}: {error or type(error).__name__}"
    return answer.status_code, ""


def hub_weight_bytes(name: str, env: Mapping[str, str] = os.environ) -> int | None:
    """Return the size of the weights that vLLM downloads; None if the hub, or a mirror of it, does
    not tell."""
    url, headers = _hub_request(f"api/models/{name}?blobs=true", env)
    try:
        answer = httpx.get(url, headers=headers, timeout=10, follow_redirects=True)
        files = {each["rfilename"]: int(each["size"]) for each in answer.json()["siblings"]}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return None
    for suffix in (".safetensors", ".bin"):
        # Makers' own copies are in folders.
        sizes = [size for path, size in files.items() if "/" not in path and path.endswith(suffix)]
        if sizes:
            return sum(sizes)
    return None


def model_room_bytes(env: Mapping[str, str] = os.environ) -> int | None:
    """Return how large the folder of the hub's models may grow; None if that is not known."""
    return room_bytes(hub_home(env), env)


def _endpoint(env: Mapping[str, str]) -> str:
    return (env.get("HF_ENDPOINT") or HUB).rstrip("/")


def _hub_request(path: str, env: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the address of a path of the hub, and the headers with the token."""
    token = hub_token(env)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return f"{_endpoint(env)}/{path}", headers
