"""Settings of the store: the types of their values, and the errors that wrong values cause.

Engines (`StoreSettings`) and nodes (`node_settings.NodeSettings`) read theirs with `parse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    GetPydanticSchema,
    ValidationError,
)

from headrace_kvstore.blocks.slot_record import tenant_number

_AS_BYTE_SIZE = GetPydanticSchema(lambda _, handler: handler.generate_schema(ByteSize))

Size = Annotated[int, _AS_BYTE_SIZE, Field(gt=0), AfterValidator(int)]
"""A number of bytes, or text such as "512MiB" or "2GiB"."""
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(pattern=r"^[\w.-]{1,200}$")]
BySalt = dict[Annotated[str, Field(min_length=1)], Size]


class SettingsError(ValueError):
    """A setting is unknown or impossible; the message names it and says why."""


class ArenaSettings(BaseModel):
    """Settings of an arena, given by each of its processes; those of its creator hold.

    Attributes:
        name: of the arena; processes that give the same name share its blocks.
        dram_bytes: its size, tables included.
        folder: where shared memory is mounted.
        socket_folder: where the StoreNode's socket is, the same for the node and its engines; None
            for the system's temporary folder.
        policy: which blocks are evicted first.
        quotas: bytes that tenants may hold, by cache salt. Requests without a salt belong to no
            tenant and have no quota.
        default_quota: bytes for each salt that is not listed; None for no limit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    name: Name = "headrace-kv"
    dram_bytes: Size = 2 * 2**30
    folder: Path = Path("/dev/shm")
    socket_folder: Path | None = None
    policy: Literal["cost-aware", "lru"] = "cost-aware"
    quotas: BySalt = Field(default_factory=dict)
    default_quota: Size | None = None

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Read a mapping, such as a configuration file's. Sizes may be text such as "2GiB".

        Raises:
            SettingsError: an unknown or impossible value.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                known = ", ".join(sorted(cls.model_fields))
                raise SettingsError(f"{path}: is unknown; give one of {known}") from None
            why = first["msg"].removeprefix("Value error, ")
            raise SettingsError(f"{path}: is {first['input']!r}: {why}") from None

    @property
    def quota_options(self) -> dict[str, Any]:
        """The quotas as the arena takes them."""
        return {
            "quotas": {tenant_number(salt): size for salt, size in self.quotas.items()},
            "default_quota": self.default_quota,
        }


class StoreSettings(ArenaSettings):
    """One engine's view of its node's store.

    Attributes:
        load, save: switch one direction off.
        lease_s: longest time that a load may take before its blocks may be evicted.
        copy_threads: threads that copy blocks in and out.
        staging_bytes: memory that layers from files pass through.
        node: ask the node's StoreNode, if there is one, for blocks that are not in DRAM.
        node_timeout_s: longest wait for these blocks; other requests do not wait.
        priced: load from below DRAM, peers and objects included, only what is predicted to take
            fewer seconds than computing.
        codec: how blocks are stored: raw is exact; fp8 and int4 are not, and shared only with
            engines that say the same.
    """

    load: Flag = True
    save: Flag = True
    lease_s: Annotated[float, Field(gt=0, le=3600, strict=True)] = 30.0
    copy_threads: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    staging_bytes: Size = 256 * 2**20
    node: Flag = True
    node_timeout_s: Annotated[float, Field(gt=0, le=60, strict=True)] = 0.25
    priced: Flag = True
    codec: Literal["raw", "fp8", "int4"] = "raw"

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Read a `kv_connector_extra_config`. Raises SettingsError."""
        try:
            return super().parse(values)
        except SettingsError as error:
            raise SettingsError(f"kv_connector_extra_config.{error}") from None
