"""The fields of the configuration file: their types, bounds, defaults and meaning.

The defaults are the `laptop` preset: two cores, no GPU, a 135M model. Every description is printed
in docs/configuration.md, so each gives the unit and what happens at the limit. The sections
`gateway`, `store` and `speculation` have files of their own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace.config.autoscaling import AutoscalingTargets, RoleAutoscaling
from headrace.config.conflicts import endpoint_conflicts, technique_conflicts
from headrace.config.gateway import GatewaySettings, Port
from headrace.config.integrity import IntegritySection
from headrace.config.models import MAX_MODELS, MODEL_KEY, MODEL_SECTIONS, with_defaults
from headrace.config.section import GIB, AbsolutePath, Resources, Section
from headrace.config.speculation import SpeculationSection
from headrace.config.store import StoreSection
from headrace.config.techniques import TechniquesSection
from headrace.placement_policies import COST, RULES

if TYPE_CHECKING:
    from headrace.router import RouterSettings as CoreRouterSettings

RAY_MIN_OBJECT_STORE_BYTES = 75 * 2**20  # ray refuses less ("OBJECT_STORE_MINIMUM_MEMORY_BYTES")
# Below it lies /hr-NAME-RANDOM/r/session_TIME_PID/sockets/plasma_store, 85 characters of 107 that a
# Unix socket's path may have.
MAX_TEMP_DIR_CHARS = 17


class ModelSettings(Section):
    """The model that is served, and its name."""

    id: str = Field(
        default="smollm2-135m-instruct",
        min_length=1,
        description="The model name that clients send. If `source` is null, also the source.",
    )
    source: str | None = Field(
        default=None,
        min_length=1,
        description="A name in `headrace model list`, downloaded if it is not in the cache, or a "
        "local folder in Hugging Face format, or a hub id such as `org/name`. null: `id`.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=16,
        description="Maximum length of a request in tokens, prompt and answer together, for both "
        "roles. null: the maximum of the model.",
    )
    adapters: dict[str, str] = Field(
        default_factory=dict,
        description="LoRA adapters by name; requests give the name as `model`. Each is a folder on "
        "every node, or a URI: `s3://`, `gs://`, `abfss://`, or `hf://` for the Hugging Face hub.",
    )
    adapters_path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder or URI whose subfolders are LoRA adapters, too. The adapter in the "
        "subfolder `sql` has the name `ID:sql`, where `ID` is `id`. null: none.",
    )


class RoleSettings(Section):
    """The replicas of one role: their number, their hardware and their engine arguments."""

    replicas: int = Field(
        default=1, ge=1, description="Number of replicas; each is one vLLM engine."
    )
    autoscaling: RoleAutoscaling | None = Field(
        default=None,
        description="Bounds between which the number of replicas follows the load; `replicas` is "
        "then what there is to begin with. null: it is always `replicas`.",
    )
    cpus: float = Field(
        default=0.5,
        ge=0,
        description="Logical CPUs that Ray reserves for each replica, or for each GPU if `gpus` is "
        "not 0. `threads` sets how many threads the engine uses.",
    )
    gpus: int = Field(
        default=0,
        ge=0,
        description="GPUs per replica; 0 runs the engine on the CPU. Must equal "
        "`engine.tensor_parallel_size`.",
    )
    accelerator_type: str | None = Field(
        default=None,
        min_length=1,
        description="Required GPU type, by Ray's name, such as `H100` or `A10G`. null: any.",
    )
    resources: Resources = Field(
        default_factory=dict,
        description="Ray's custom resources that each replica reserves, or each GPU of it. It runs "
        "only on nodes of the cluster that offer them.",
    )
    threads: int = Field(
        default=1, ge=1, description="Compute threads of each engine that runs on the CPU."
    )
    kv_cache_gb: float | None = Field(
        default=None,
        gt=0,
        description="GiB of KV cache for each GPU, or for each engine on the CPU. null: 1 GiB on "
        "the CPU; on a GPU, all the memory that `engine.gpu_memory_utilization` leaves.",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM engine arguments by their Python names, such as `max_num_seqs`. They "
        "override the values that Headrace sets.",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of the processes of this role.",
    )

    @field_validator("env", mode="before")
    @classmethod
    def _env_values_are_text(cls, value: Any) -> Any:
        """Make numbers text: YAML reads `1` as a number, and the environment holds text."""
        if isinstance(value, dict):
            plain = (int, float)
            return {
                k: str(v) if isinstance(v, plain) and not isinstance(v, bool) else v
                for k, v in value.items()
            }
        return value

    @property
    def bounds(self) -> tuple[int, int]:
        """Minimum and maximum number of replicas."""
        scaling = self.autoscaling
        if scaling is None:
            return self.replicas, self.replicas
        return scaling.min_replicas, scaling.max_replicas

    @property
    def kv_cache_bytes(self) -> int | None:
        """Bytes of KV cache for each GPU or CPU engine; None leaves the size to vLLM."""
        if self.kv_cache_gb is not None:
            return int(self.kv_cache_gb * GIB)
        return GIB if self.gpus == 0 else None

    @property
    def world_size(self) -> int:
        """Tensor parallel workers of an engine."""
        size = self.engine.get("tensor_parallel_size", 1)
        return size if isinstance(size, int) and size > 0 else 1


class RouterSettings(Section):
    """How each request's plan is chosen: prefill in the decode replica or in a prefill replica."""

    policy: Literal["cost", "local", "remote"] = Field(
        default="cost",
        description="`cost` takes the plan with the fewest predicted seconds. `local` always "
        "prefills in the decode replica. `remote` always prefills in a prefill replica, if one is "
        "up.",
    )
    placement: str = Field(
        default=COST,
        min_length=1,
        max_length=64,
        description="Placement policy that chooses the replicas. "
        + " ".join(f"`{name}`: {rule}." for name, rule in RULES.items())
        + " Or the name of a policy that a package adds.",
    )
    itl_target_s: float | None = Field(
        default=None,
        gt=0,
        description="Target for the inter-token latency of running streams, in seconds. A local "
        "prefill that would break it is done remotely, and one that keeps it costs them nothing. "
        "null: each second that a stream loses counts like a second of waiting.",
    )
    timeout_cold_s: float = Field(
        default=15.0,
        gt=0,
        description="Minimum timeout of a remote prefill in seconds, until a first one has "
        "succeeded. After the timeout, the decode replica prefills itself.",
    )
    retry_s: float = Field(
        default=5.0,
        gt=0,
        description="Seconds after a failed remote prefill until one request tries it again. The "
        "time doubles with each failure.",
    )
    retry_max_s: float = Field(
        default=120.0, gt=0, description="Maximum seconds between such tries."
    )

    def to_settings(self) -> CoreRouterSettings:
        """Return the same settings as the router library's own class.

        Raises:
            ValueError: there is no such placement policy.
        """
        from headrace.router import RouterSettings as Core
        from headrace.router.placement.policies import make_policy

        make_policy(self.placement)
        return Core(**self.model_dump())


class RaySettings(Section):
    """The Ray cluster: a private node that Headrace starts, or a running cluster to join."""

    address: str | None = Field(
        default=None,
        min_length=1,
        description="Address of a running Ray cluster to join: `host:port` or `auto`. null: start "
        "a private Ray node, which the other fields of this section describe.",
    )
    dashboard: bool = Field(
        default=True, description="Whether Ray's dashboard runs (on 127.0.0.1)."
    )
    dashboard_port: Port | None = Field(
        default=None, description="Port of the dashboard; null or 0 takes a free port."
    )
    num_cpus: int | None = Field(
        default=None,
        ge=1,
        description="Logical CPUs of the Ray node. null: the largest of 4, the number of cores, "
        "and what the replicas reserve.",
    )
    fork_server: bool = Field(
        default=True,
        description="Whether processes start as forks of one that has imported vLLM and Ray Serve, "
        "which takes it 15 s of a processor. false: each imports them for itself.",
    )
    object_store_bytes: int = Field(
        default=200_000_000,
        ge=RAY_MIN_OBJECT_STORE_BYTES,
        description="Bytes of /dev/shm for Ray's object store. KV does not pass through it.",
    )
    temp_dir: AbsolutePath | None = Field(
        default=None,
        description="Absolute path of a folder for the node's temporary files. null: the system's "
        f"folder. At most {MAX_TEMP_DIR_CHARS} characters, because Unix sockets are created in it.",
    )

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None and value != "auto" and not re.search(r"[^:/]:[0-9]{1,5}$", value):
            raise ValueError(f'must be "auto" or like "10.0.0.1:6379", got "{value}"')
        return value

    @field_validator("temp_dir")
    @classmethod
    def _is_short(cls, value: str | None) -> str | None:
        if value is not None and len(value) > MAX_TEMP_DIR_CHARS:
            raise ValueError(
                f"must have at most {MAX_TEMP_DIR_CHARS} characters, got {len(value)}: Ray's Unix "
                "sockets lie below it, and their paths may not pass 107"
            )
        return value


class ObservabilitySettings(Section):
    """Logs and traces."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Minimum severity of log messages."
    )
    log_json: bool = Field(
        default=True, description="Log one JSON object per line; false: plain text."
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="OpenTelemetry collector that receives spans, `http://host:port`. null: none.",
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^/\s]+\S*", value):
            raise ValueError(f'must be like "http://host:4317", got "{value}"')
        return value


class AppFields(Section):
    """The fields that `headrace.app:build_app` reads."""

    drain_s: float = Field(
        default=120,
        ge=0,
        description="Seconds that a stopped replica or gateway has to finish its requests. It is "
        "stopped when their number is reduced or the app is redeployed, and gets no new requests. "
        "Requests that remain are cut. A replica that hangs keeps its hardware that long.",
    )
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    router: RouterSettings = Field(default_factory=RouterSettings)
    store: StoreSection = Field(default_factory=StoreSection)
    speculation: SpeculationSection = Field(default_factory=SpeculationSection)
    integrity: IntegritySection = Field(default_factory=IntegritySection)
    techniques: TechniquesSection = Field(default_factory=TechniquesSection)
    observability: ObservabilitySettings = Field(default_factory=ObservabilitySettings)


class AppSection(AppFields):
    """The section `headrace` of a Serve app's args. A configuration file's values are compared by
    `headrace.config.checks`, which reports all problems at once."""

    @model_validator(mode="after")
    def _values_fit_together(self) -> Self:
        """Refuse values that cannot work together."""
        found = [
            f"{field}: {what}"
            for field, what in (
                *endpoint_conflicts(self.gateway),
                *technique_conflicts(self.techniques, self.store),
            )
        ]
        if found:
            raise ValueError("; and ".join(found))
        return self


class ModelAppSection(Section):
    """The section `headrace` of one of several models in a Serve app's args."""

    router: RouterSettings = Field(default_factory=RouterSettings)
    speculation: SpeculationSection = Field(default_factory=SpeculationSection)
    techniques: TechniquesSection = Field(default_factory=TechniquesSection)


class EngineSections(Section):
    """The sections of a model's engines, which a Serve app's args have in Ray's form."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    prefill: RoleSettings = Field(default_factory=RoleSettings)
    decode: RoleSettings = Field(default_factory=RoleSettings)
    autoscaling: AutoscalingTargets = Field(default_factory=AutoscalingTargets)


class ServedModelSection(ModelAppSection, EngineSections):
    """One of several models. The top level has the values of the fields that it leaves out."""


class HeadraceConfig(EngineSections, AppFields):
    """The whole configuration file."""

    ray: RaySettings = Field(default_factory=RaySettings)
    models: dict[Annotated[str, Field(pattern=MODEL_KEY)], ServedModelSection] = Field(
        default_factory=dict,
        max_length=MAX_MODELS,
        description="Several models at one endpoint, by a name in lower-case letters, digits "
        "and `-`. Each has sections of its own: "
        + ", ".join(f"`{name}`" for name in MODEL_SECTIONS)
        + ". Fields that it leaves out have the top level's values; only `model.id` is the name "
        "then, and `model.source` null. All other sections are the app's. Empty: the app serves "
        "the one model of the top level.",
    )

    @model_validator(mode="before")
    @classmethod
    def _models_have_all_fields(cls, data: Any) -> Any:
        return with_defaults(data)

    def served_models(self) -> dict[str, HeadraceConfig]:
        """Return the configuration of each model as if it were the only one, by its name in
        `models`; by the empty name without `models`."""
        if not self.models:
            return {"": self}
        return {
            name: self.model_copy(
                update={"models": {}, **{each: getattr(model, each) for each in MODEL_SECTIONS}}
            )
            for name, model in self.models.items()
        }

    def roles(self) -> dict[str, RoleSettings]:
        """Return the two roles of the only model, by name."""
        return {"prefill": self.prefill, "decode": self.decode}

    def all_roles(self) -> list[RoleSettings]:
        """Return the two roles of each model."""
        return [role for model in self.served_models().values() for role in model.roles().values()]

    def cpus_booked(self) -> float:
        """Return the logical CPUs that the maximum number of replicas reserves in Ray, without the
        control plane."""
        return sum(
            role.bounds[1] * role.cpus * max(1, role.world_size) for role in self.all_roles()
        )
