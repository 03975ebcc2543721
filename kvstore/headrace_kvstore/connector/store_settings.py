"""The store's settings in `kv_connector_extra_config`, checked before an engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from headrace_kvstore.settings import ArenaSettings, Flag, SettingsError, Size


class StoreSettings(ArenaSettings):
    """One engine's view of its node's store.

    Attributes:
        load, save: switch one direction off.
        lease_s: longest time that a load may take before its blocks may be evicted.
        copy_threads: threads that copy blocks in and out.
        staging_bytes: memory that layers from files pass through.
        node: ask the node's StoreNode for what is not in DRAM, where there is one.
        node_timeout_s: longest wait for what it has; other requests go on meanwhile.
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
