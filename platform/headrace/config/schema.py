"""The fields of the configuration file: their types, bounds, defaults and meaning.

The defaults are the `laptop` preset: two cores, no GPU, a 135M model. Every description here is
printed in docs/configuration.md, so it says the unit and what happens at the edge. The sections
`store` and `speculation` have files of their own.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace.config.keyfile import HASH
from headrace.config.section import GIB, Section
from headrace.config.speculation import SpeculationSection
from headrace.config.store import StoreSection

if TYPE_CHECKING:
    from headrace.router import RouterSettings as CoreRouterSettings

TokenPath = Literal["relay", "direct", "classic"]

RAY_MIN_OBJECT_STORE_BYTES = 75 * 2**20  # ray refuses less ("OBJECT_STORE_MINIMUM_MEMORY_BYTES")
# Below it lie /hr-NAME-RANDOM/r/session_TIME_PID/sockets/plasma_store, 85 characters of 107 that a
# Unix socket's path may have, and HAProxy's /hr-NAME-RANDOM/h/NODE/m, 80 of its 97.
MAX_TEMP_DIR_CHARS = 17

_HOSTNAME = re.compile(r"^(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?$")
_ORIGIN = re.compile(r"https?://[^/\s]+")
_API_KEY = re.compile(r"^[\x21-\x7e]{8,}$")

Port = Annotated[int, Field(ge=0, le=65535)]


class ModelSettings(Section):
    """Which model is served, and under which name."""

    id: str = Field(
        default="smollm2-135m-instruct",
        min_length=1,
        description="The name clients send as `model`, and the name looked up in "
        "`headrace model list` when `source` is null.",
    )
    source: str | None = Field(
        default=None,
        min_length=1,
        description="A local Hugging Face folder or a hub id such as `org/name`. null: the model "
        "called `id`, from the cache, fetched if it is not there.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=16,
        description="Tokens of prompt and answer together that one request may use, in both roles. "
        "null: what the model was made for.",
    )


class RoleSettings(Section):
    """One role's replicas: how many, on what, and its engine's settings."""

    replicas: int = Field(default=1, ge=1, description="How many engines this role runs.")
    cpus: float = Field(
        default=0.5,
        ge=0,
        description="Logical CPUs that Ray reserves per replica (per GPU where there are GPUs). "
        "Books room only; `threads` sets what the engine uses.",
    )
    gpus: int = Field(
        default=0,
        ge=0,
        description="GPUs per replica; 0 runs the engine on the CPU. Must equal "
        "`engine.tensor_parallel_size` x `engine.pipeline_parallel_size`.",
    )
    accelerator_type: str | None = Field(
        default=None,
        min_length=1,
        description="Ray's name of the GPU to insist on, such as `H100` or `A10G`. null: any.",
    )
    threads: int = Field(default=1, ge=1, description="Compute threads of an engine on the CPU.")
    kv_cache_gb: float | None = Field(
        default=None,
        gt=0,
        description="GiB of KV cache per GPU, or per engine on the CPU. null: 1 GiB on the CPU; on "
        "GPUs all that `engine.gpu_memory_utilization` leaves.",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Any engine arguments of vLLM, by their Python names. They win over what "
        "Headrace would set.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of this role's processes.",
    )

    @field_validator("env", mode="before")
    @classmethod
    def _env_values_are_text(cls, value: Any) -> Any:
        """YAML reads `1` as a number; the environment holds text."""
        if isinstance(value, dict):
            plain = (int, float)
            return {
                k: str(v) if isinstance(v, plain) and not isinstance(v, bool) else v
                for k, v in value.items()
            }
        return value

    @property
    def kv_cache_bytes(self) -> int | None:
        """Bytes of KV cache asked for, per GPU or per CPU engine; None leaves it to vLLM."""
        if self.kv_cache_gb is not None:
            return int(self.kv_cache_gb * GIB)
        return GIB if self.gpus == 0 else None

    @property
    def world_size(self) -> int:
        """Engine workers that vLLM makes: tensor parallel x pipeline parallel."""
        sizes = (self.engine.get(k, 1) for k in ("tensor_parallel_size", "pipeline_parallel_size"))
        tensor, pipeline = (s if isinstance(s, int) and s > 0 else 1 for s in sizes)
        return tensor * pipeline


class GatewaySettings(Section):
    """The public endpoint: where it listens, who may call, and how much a request may ask."""

    host: str = Field(
        default="127.0.0.1", description="Address to listen on; `0.0.0.0` is everywhere."
    )
    port: Port | None = Field(
        default=8000,
        description="Port to listen on; 0 takes a free one. null: none of its own, requests come "
        "through Serve's proxy; only where the app is deployed without `headrace up`.",
    )
    replicas: int = Field(default=1, ge=1, description="How many gateways run.")
    api_keys: list[str] = Field(
        default_factory=list,
        description="Keys of which each request must carry one as `Authorization: Bearer KEY`. "
        "Each is a tenant of its own with the role user. Empty here and no `api_keys_file`: no key "
        "is asked for.",
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
        description="Hash of one more key, with the role admin. `headrace up` makes such a key for "
        "its own commands.",
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
        description="Longest request body, in bytes; longer is answered 413.",
    )
    request_timeout_s: float = Field(
        default=600, gt=0, description="Seconds that one request may take, its stream included."
    )
    connect_timeout_s: float = Field(
        default=5, gt=0, description="Seconds to wait for a connection to a decode replica."
    )
    queue_timeout_s: float = Field(
        default=120,
        gt=0,
        description="Seconds a request waits for a decode replica to be ready before its 503.",
    )
    body_timeout_s: float = Field(
        default=30, gt=0, description="Seconds a client may take to send its body before its 408."
    )
    max_concurrent: int = Field(
        default=1024,
        ge=1,
        description="Requests in flight per gateway; one more is answered 429 with `Retry-After`.",
    )
    allowed_origins: list[str] = Field(
        default_factory=list,
        description="Sites whose pages may call the API from a browser (CORS), such as "
        '`https://chat.example.com`; `"*"` is any site. Empty: none. The administration under '
        "`/headrace/` is never open to them.",
    )
    allowed_methods: list[str] = Field(
        default=["*"], description='HTTP methods that such pages may use; `"*"` is any.'
    )
    allowed_headers: list[str] = Field(
        default=["*"], description='Request headers that such pages may send; `"*"` is any.'
    )
    allow_credentials: bool = Field(
        default=False,
        description="Whether browsers may send cookies and other credentials. "
        "`allowed_origins` must then name the sites.",
    )

    @field_validator("host")
    @classmethod
    def _host_is_an_address(cls, value: str) -> str:
        try:
            ipaddress.ip_address(value)
        except ValueError:
            digits_only = re.fullmatch(r"[0-9.]+", value)
            if digits_only or not _HOSTNAME.match(value):
                raise ValueError(
                    f'must be an IP address or a host name without scheme or port, got "{value}"'
                ) from None
        return value

    @field_validator("api_keys")
    @classmethod
    def _keys_can_travel_in_a_header(cls, value: list[str]) -> list[str]:
        for position, key in enumerate(value):
            if not _API_KEY.match(key):
                raise ValueError(
                    f"key {position} must be 8 or more visible ASCII characters without spaces"
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
    def _credentials_need_names(self) -> GatewaySettings:
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError('allow_credentials: allowed_origins must name the sites, not "*"')
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
    def asks_for_keys(self) -> bool:
        """Whether a request needs an API key."""
        return bool(self.api_keys) or self.api_keys_file is not None


class RouterSettings(Section):
    """How each request's plan (prefill here or there) is chosen."""

    policy: Literal["cost", "local", "remote"] = Field(
        default="cost",
        description="`cost` takes the way with the fewest predicted seconds; `local` never "
        "prefills remotely; `remote` always does while a prefill replica is up.",
    )
    itl_target_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds between tokens that running streams should keep; a local prefill that "
        "would break it is sent away. null: no target, only the priced stall counts.",
    )
    stall_weight: float = Field(
        default=1.0,
        ge=0,
        description="How many seconds of the new request's wait one second of stall of one running "
        "stream is worth.",
    )
    remeasure_s: float = Field(
        default=60,
        gt=0,
        description="Seconds after which a way that was not taken is tried again, to see whether "
        "its cost has changed.",
    )

    timeout_floor_s: float = Field(
        default=1.0, gt=0, description="Least seconds a remote prefill is given."
    )
    timeout_factor: float = Field(
        default=4.0,
        ge=1,
        description="A remote prefill is given this many times its predicted seconds, then the "
        "decode replica prefills itself.",
    )
    timeout_errors: float = Field(
        default=6.0,
        ge=0,
        description="It is also given the prediction and this many of its root mean square errors.",
    )
    timeout_cold_s: float = Field(
        default=15.0,
        gt=0,
        description="Least seconds given before the first remote prefill has come back.",
    )
    retry_s: float = Field(
        default=5.0,
        gt=0,
        description="Seconds after a failed remote prefill until one request tries again; doubles "
        "with each failure.",
    )
    retry_max_s: float = Field(default=120.0, gt=0, description="Most seconds between such tries.")

    def to_settings(self) -> CoreRouterSettings:
        """The same settings as the router library's own class."""
        from headrace.router import RouterSettings as Core

        return Core(**self.model_dump())


class RaySettings(Section):
    """The Ray cluster: an own private node, or one that runs already."""

    address: str | None = Field(
        default=None,
        min_length=1,
        description="Address of a running Ray cluster to join, `host:port` or `auto`. null: start "
        "a private node; the other fields of this section describe that node only.",
    )
    dashboard: bool = Field(
        default=True, description="Whether Ray's dashboard runs (on 127.0.0.1)."
    )
    dashboard_port: Port | None = Field(
        default=None, description="Port of the dashboard; null or 0 takes a free one."
    )
    num_cpus: int | None = Field(
        default=None,
        ge=1,
        description="Logical CPUs that Ray may book. null: the machine's cores or 4, if that is "
        "more, or what the replicas need, if that is more still.",
    )
    object_store_bytes: int = Field(
        default=200_000_000,
        ge=RAY_MIN_OBJECT_STORE_BYTES,
        description="Bytes of /dev/shm for Ray's object store. KV does not pass through it.",
    )
    temp_dir: str | None = Field(
        default=None,
        description="Absolute folder under which the node's own folder is made and removed. "
        f"null: the system's. At most {MAX_TEMP_DIR_CHARS} characters, as sockets lie in it.",
    )

    @field_validator("temp_dir")
    @classmethod
    def _short_and_absolute(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith("/"):
            raise ValueError(f'must be an absolute path, got "{value}"')
        if len(value) > MAX_TEMP_DIR_CHARS:
            raise ValueError(
                f"must have at most {MAX_TEMP_DIR_CHARS} characters, got {len(value)}: Ray's Unix "
                "sockets lie below it, and their paths may not pass 107"
            )
        return value


class ObservabilitySettings(Section):
    """Logs and traces."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least severity that is logged."
    )
    log_json: bool = Field(default=True, description="One JSON object a line; false: plain text.")
    otlp_endpoint: str | None = Field(
        default=None,
        description="OpenTelemetry collector to send spans to, `http://host:port`. null: none.",
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"^https?://[^/\s]+", value):
            raise ValueError(f'must be like "http://host:4317", got "{value}"')
        return value


class AppSection(Section):
    """What `headrace.app:build_app` reads: the `headrace` section of a Serve application's args."""

    token_path: TokenPath = Field(
        default="relay",
        description="How tokens reach the client. `relay`: the gateway passes the replica's HTTP "
        "stream on, byte for byte. `direct`: HAProxy joins client and replica; no API keys. "
        "`classic`: Ray's ingress, an actor call per batch of tokens; no API keys.",
    )
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    router: RouterSettings = Field(default_factory=RouterSettings)
    store: StoreSection = Field(default_factory=StoreSection)
    speculation: SpeculationSection = Field(default_factory=SpeculationSection)
    observability: ObservabilitySettings = Field(default_factory=ObservabilitySettings)

    @model_validator(mode="after")
    def _keys_are_checked_on_this_path(self) -> Self:
        """Keys that nothing checks would leave the endpoint open to all: refuse to start."""
        if self.token_path != "relay" and (self.gateway.api_keys or self.gateway.api_keys_file):
            field = "api_keys" if self.gateway.api_keys else "api_keys_file"
            raise ValueError(
                f'token_path: is "{self.token_path}", which checks no API key, but '
                f"gateway.{field} is set; use token_path: relay, or remove the keys and put an "
                "authenticating proxy in front"
            )
        return self

    @model_validator(mode="after")
    def _nobody_unknown_may_ask(self) -> Self:
        """An endpoint that other machines reach asks for keys, or says that it is insecure."""
        gateway, direct = self.gateway, self.token_path == "direct"
        closed = gateway.loopback and not direct
        if closed or gateway.port is None or gateway.asks_for_keys or gateway.insecure:
            return self
        where = "HAProxy listens on all interfaces" if direct else f"listens on {gateway.host}"
        raise ValueError(
            f"gateway.host: {where} without API keys, so anyone who reaches this machine could use "
            "the model; set gateway.api_keys_file (`headrace keys add` makes one), or host: "
            "127.0.0.1 with token_path: relay, or gateway.insecure: true"
        )


class HeadraceConfig(AppSection):
    """The whole file: what the app reads, and what it is made of and runs on."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    prefill: RoleSettings = Field(default_factory=RoleSettings)
    decode: RoleSettings = Field(default_factory=RoleSettings)
    ray: RaySettings = Field(default_factory=RaySettings)

    def roles(self) -> dict[str, RoleSettings]:
        """The two roles by name."""
        return {"prefill": self.prefill, "decode": self.decode}

    def cpus_booked(self) -> float:
        """Logical CPUs that all replicas book in Ray, without the control plane."""
        return sum(r.replicas * r.cpus * max(1, r.world_size) for r in self.roles().values())
