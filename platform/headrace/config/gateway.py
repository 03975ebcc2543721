"""The section `gateway`: the public HTTP endpoint."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from headrace.config.batches import BatchSettings
from headrace.config.conversations import ConversationSettings
from headrace.config.key_file import HASH, NAME, ModelName, RetentionSeconds
from headrace.config.models import MAX_MODELS
from headrace.config.section import Resources, Section
from headrace.config.tls_files import TlsFiles

_HOSTNAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_ORIGIN = re.compile(r"https?://[^/\s]+")
_API_KEY = re.compile(r"[\x21-\x7e]{8,}")

Port = Annotated[int, Field(ge=0, le=65535)]
AliasWeights = Annotated[
    dict[ModelName, Annotated[float, Field(gt=0, allow_inf_nan=False)]],
    Field(min_length=1, max_length=MAX_MODELS),
]


class SloClassSettings(Section):
    """Service level of the requests of one class."""

    ttft_target_s: float | None = Field(
        default=None,
        gt=0,
        description="Maximum seconds to the first token. A request that cannot have it in time is "
        "answered 429 at once. null: no target.",
    )
    itl_target_s: float | None = Field(
        default=None,
        gt=0,
        description="Longest engine step that streams of this class should see: no more streams "
        "are sent to an engine than keep it. null: no target.",
    )
    priority: int = Field(
        default=0,
        ge=-1000,
        le=1000,
        description="Requests pass those of the same tenant with a lower one.",
    )
    max_wait_s: float = Field(
        default=120,
        gt=0,
        description="Maximum seconds in the queue, for a request without a `ttft_target_s`.",
    )
    background: bool = Field(
        default=False,
        description="Send requests of this class only while no other request waits and no engine "
        "has a prompt to compute.",
    )

    @model_validator(mode="after")
    def _background_has_no_target(self) -> SloClassSettings:
        if self.background and self.ttft_target_s is not None:
            raise ValueError("ttft_target_s: a background class has no target; set max_wait_s")
        return self


class AdmissionSettings(Section):
    """The queue in front of the replicas: SLO classes, fair shares, early refusal."""

    classes: dict[Annotated[str, Field(pattern=NAME)], SloClassSettings] = Field(
        default_factory=dict,
        max_length=64,
        description="SLO classes by name. A request names one in the header `x-headrace-slo` or "
        "the field `vllm_xargs.slo`; an unknown name is answered 400.",
    )
    default_class: str | None = Field(
        default=None,
        description="Class of requests that name none and whose key has none. null: no targets.",
    )
    max_waiting: int = Field(
        default=1024,
        ge=1,
        le=100_000,
        description="Maximum number of requests in a gateway's queue. They count toward "
        "`max_concurrent`.",
    )
    requests_per_replica: int = Field(
        default=64,
        ge=1,
        description="Maximum requests at each replica until its step times are known.",
    )

    @model_validator(mode="after")
    def _default_exists(self) -> AdmissionSettings:
        if self.default_class is not None and self.default_class not in self.classes:
            raise ValueError(f"default_class: there is no class {self.default_class!r}")
        return self


class UsageSettings(Section):
    """The ledger of usage by tenant and model, hour by hour (`headrace usage`)."""

    enabled: bool = Field(
        default=True,
        description="Keep what requests cost by tenant and model, where conversation state is kept "
        "(`gateway.conversations.folder` or `object_url`, in a file of its own). false: only the "
        "metrics and the usage of the last requests.",
    )
    ttl_s: float = Field(
        default=34_560_000,
        ge=86_400,
        le=315_360_000,
        description="Seconds for which a day is kept; 400 days by default.",
    )


class GatewaySettings(Section):
    """The public HTTP endpoint: its address, its API keys and its limits."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on; `0.0.0.0` means all IPv4 addresses, `::` all addresses.",
    )
    port: Port | None = Field(
        default=8000,
        description="Port to listen on; 0 takes a free port. null: the gateway has no port of its "
        "own and gets requests through Serve's proxy. null is for apps that are deployed without "
        "`headrace up`.",
    )
    replicas: int = Field(default=1, ge=1, description="Number of gateways.")
    resources: Resources = Field(
        default_factory=dict,
        description="Ray's custom resources that each gateway reserves. It runs only on nodes of "
        "the cluster that offer them.",
    )
    api_keys: list[str] = Field(
        default_factory=list,
        description="Accepted API keys; each request must carry one as `Authorization: Bearer "
        "KEY`. Each key is a tenant of its own with the role user. With no keys here and no "
        "`api_keys_file`, no key is required.",
    )
    api_keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="A key file, made by `headrace keys add`: names, hashes, tenants, roles and "
        "limits. Every gateway reads it again when it changes, so each gateway's machine must hold "
        "it. A relative path counts from the configuration file's folder.",
    )
    admin_key_hash: str | None = Field(
        default=None,
        pattern=HASH,
        description="Hash of one more key, with the role admin: `sha256:` and the SHA-256 of the "
        "key in hexadecimal. With it each request must carry a key, as with `api_keys`.",
    )
    operator_key_hash: str | None = Field(
        default=None,
        pattern=HASH,
        description="Hash of the key that `headrace up` makes for its own commands, in the form of "
        "`admin_key_hash`. `headrace up` sets this field.",
    )
    insecure: bool = Field(
        default=False,
        description="Start even if other machines can reach the endpoint and no keys are "
        "configured: anyone who reaches it may then use the model.",
    )
    trusted_proxies: list[str] = Field(
        default_factory=list,
        description="Addresses and networks of proxies whose `X-Forwarded-For` names the client. "
        "From any other address the header changes nothing.",
    )
    max_body_bytes: int = Field(
        default=8_000_000,
        ge=1_000,
        description="Maximum size of a request body in bytes; a larger one is answered 413.",
    )
    body_budget_bytes: int = Field(
        default=1_000_000_000,
        ge=1_000,
        description="Maximum bytes that the request bodies in a gateway hold at once; a request "
        "for which there is no room is answered 429 with `Retry-After`. One tenant's bodies take "
        "at most as many bytes as are free. At least twice `max_body_bytes`.",
    )
    tls_cert_file: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file with the server's certificate and its intermediate certificates. "
        "With it the endpoint speaks HTTPS only (TLS 1.2 or newer). Every gateway reads it again "
        "when it changes. A relative path counts from the configuration file's folder. null: HTTP.",
    )
    tls_key_file: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file of that certificate's private key, not encrypted.",
    )
    tls_client_ca_file: str | None = Field(
        default=None,
        min_length=1,
        description="PEM file of certificate authorities. With it a client must show a certificate "
        "that one of them signed (mutual TLS), besides its API key. null: no client certificates.",
    )
    request_timeout_s: float = Field(
        default=600, gt=0, description="Maximum seconds for one request, its stream included."
    )
    queue_timeout_s: float = Field(
        default=120,
        gt=0,
        description="Seconds that a request waits for a ready decode replica; then it is answered "
        "503.",
    )
    body_timeout_s: float = Field(
        default=30,
        gt=0,
        description="Seconds that a client may take to send a body; then it is answered 408.",
    )
    max_concurrent: int = Field(
        default=1024,
        ge=1,
        description="Maximum requests in flight for each model of a gateway; a further one is "
        "answered 429 with `Retry-After`.",
    )
    max_retention_s: RetentionSeconds = Field(
        default=3600,
        description="Maximum seconds for which a request may have its prompt's KV retained in DRAM "
        "(`prompt_cache_retention`, `cache_control`), unless its key says otherwise; requests that "
        "ask for more get this. 0: such fields have no effect.",
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Names by which clients may reach the endpoint while it has neither API keys "
        "nor TLS, such as `llm.example.com` or `*.example.com`; `*` is any. IP addresses, names "
        "without a dot and names of local networks (`.local`, `.internal`, `.svc`, ...) are always "
        "allowed. A request for any other `Host` is answered 403, so that no web page can use the "
        "endpoint through a name of its own (DNS rebinding).",
    )
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="Sites whose pages may call the API from a browser (CORS), such as "
        '`https://chat.example.com`; `"*"` is any site. Empty: none. The administration under '
        "`/headrace/` is never open to them.",
    )
    aliases: dict[ModelName, AliasWeights] = Field(
        default_factory=dict,
        max_length=1024,
        description="More names for models. `NAME: MODEL`, or `NAME: {MODEL: WEIGHT, ...}` to "
        "divide conversations among models by weight, such as two versions of one. A conversation "
        "stays with its model. The answer names the model.",
    )
    default_model: ModelName | None = Field(
        default=None,
        description="The model or alias of requests that name none, where there are several models."
        " null: such a request is answered 400.",
    )
    admission: AdmissionSettings | None = Field(
        default=None,
        description="SLO classes, and a queue in front of the replicas that is fair to tenants "
        "and refuses at once requests whose answers would come too late. null: requests go to "
        "replicas as they come.",
    )

    conversations: ConversationSettings = Field(
        default_factory=ConversationSettings,
        description="The responses and conversations that the gateway keeps.",
    )
    batches: BatchSettings = Field(
        default_factory=BatchSettings,
        description="Batches of requests, which fill what other requests leave.",
    )
    usage: UsageSettings = Field(
        default_factory=UsageSettings, description="What requests cost, by tenant and model."
    )

    @field_validator("aliases", mode="before")
    @classmethod
    def _one_model_needs_no_weight(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {k: {v: 1.0} if isinstance(v, str) else v for k, v in value.items()}

    @field_validator("host")
    @classmethod
    def _host_is_an_address(cls, value: str) -> str:
        try:
            ipaddress.ip_address(value)
        except ValueError:
            digits_only = re.fullmatch(r"[0-9.]+", value)
            if digits_only or not _HOSTNAME.fullmatch(value):
                raise ValueError(
                    f'must be an IP address or a host name without scheme or port, got "{value}"'
                ) from None
        return value

    @field_validator("api_keys")
    @classmethod
    def _keys_can_travel_in_a_header(cls, value: list[str]) -> list[str]:
        for position, key in enumerate(value):
            if not _API_KEY.fullmatch(key):
                raise ValueError(
                    f"key {position} must be 8 or more visible ASCII characters without spaces"
                )
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_names(cls, value: list[str]) -> list[str]:
        for host in value:
            if host != "*" and not _HOSTNAME.match(host.removeprefix("*.")):
                raise ValueError(
                    f'must be a host name without scheme or port, "*.NAME" or "*": "{host}"'
                )
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f'must be "*" or like https://host:port without a path: "{origin}"'
                )
        return value

    @model_validator(mode="after")
    def _tls_is_whole(self) -> GatewaySettings:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file: tls_cert_file and tls_key_file need each other")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_client_ca_file: needs tls_cert_file and tls_key_file")
        if self.tls_cert_file is not None and self.port is None:
            raise ValueError(
                "tls_cert_file: the gateway has no port of its own (port: null); set a port, or "
                "end TLS before Serve's proxy"
            )
        return self

    @model_validator(mode="after")
    def _one_body_fits(self) -> GatewaySettings:
        if self.body_budget_bytes < 2 * self.max_body_bytes:
            raise ValueError(
                f"body_budget_bytes: is {self.body_budget_bytes}, but one body may have "
                f"{self.max_body_bytes} (max_body_bytes), and a tenant may hold half of it; set at "
                "least twice that"
            )
        return self

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies_are_networks(cls, value: list[str]) -> list[str]:
        for position, each in enumerate(value):
            try:
                ipaddress.ip_network(each, strict=False)
            except ValueError:
                raise ValueError(
                    f"{position} must be an IP address or a network such as 10.0.0.0/8"
                ) from None
        return value

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the endpoint."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def tls(self) -> TlsFiles | None:
        """The files for HTTPS; None for plain HTTP."""
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        client_ca = self.tls_client_ca_file
        return TlsFiles(
            Path(self.tls_cert_file),
            Path(self.tls_key_file),
            None if client_ca is None else Path(client_ca),
        )

    @property
    def asks_for_keys(self) -> bool:
        """Whether a request needs an API key."""
        return bool(self.api_keys) or self.api_keys_file is not None or bool(self.admin_key_hash)
