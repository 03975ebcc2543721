"""The section `store`: the KV store and its tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from headrace.config.section import GIB, AbsolutePath, ObjectUrl, Section

SHARED = "socket_folder", "policy"
"""Settings that engines and node must have alike. The first of them to start makes the arena."""


class StoreSection(Section):
    """The KV store that all engines of a machine share."""

    enabled: bool = Field(
        default=True,
        description="Keep KV blocks outside of the engines' own caches. Applies if "
        "`engine.kv_transfer_config` names NixlConnector, which is the default.",
    )
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.-]{1,200}$",
        description="Name of the shared-memory file in /dev/shm on each machine. null: a new name "
        "for each start. `headrace down` removes the file.",
    )
    dram_gb: float = Field(
        default=1.0,
        gt=0,
        description="GiB of shared memory on each machine that runs engines, tables included.",
    )
    nvme_folder: AbsolutePath | None = Field(
        default=None,
        min_length=1,
        description="Absolute path of a folder on a local disk; its KV blocks outlive restarts. "
        "The path is the same on every machine. Nodes of this app that find it in use, as several "
        "pods of a machine do, take subfolders; another app waits for it. null: no NVMe tier.",
    )
    nvme_gb: float = Field(
        default=16.0,
        gt=0,
        description="Maximum GiB of the files in `nvme_folder`, for each Ray node with engines: "
        "each machine, or with the chart each engine pod.",
    )
    nvme_sync: bool = Field(
        default=False,
        description="Sync each block to the disk before it counts as written. Without "
        "it, a power failure loses the last seconds of writes; checksums find the rest.",
    )
    object_url: ObjectUrl | None = Field(
        default=None,
        description="Object store for blocks that were reused, shared by all machines: "
        "`s3://BUCKET/PREFIX`, `gs://`, `az://` or `file:///FOLDER`. Needs the extra "
        "`headrace[object]`. All who can write there are trusted. null: no object tier.",
    )
    object_gb: float = Field(default=64.0, gt=0, description="Maximum GiB of this app's objects.")
    object_options: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="Options of the object store's client (`endpoint`, `region`, `access_key_id`, "
        "...). They override the environment. `headrace config show` masks the values.",
    )
    share: bool = Field(
        default=True,
        description="Let the machines of a cluster pull KV blocks from each other. Each machine "
        "then listens on free ports of its Ray address, and answers only machines of this app. "
        "UCX, which moves the blocks, opens ports of its own and does not ask who connects: "
        "let a firewall protect them. A single machine opens no port.",
    )
    system_prompts: list[str] = Field(
        default_factory=list,
        description="System messages whose KV is computed when a decode replica starts, and "
        "pinned.",
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="More settings of the connector in the engines; docs/kvstore-vllm.md "
        "lists them (`lease_s`, `copy_threads`, ...).",
    )
    node: dict[str, Any] = Field(
        default_factory=dict,
        description="More settings of the StoreNode of each machine; docs/kvstore-vllm.md "
        "lists them (`events`, `warm`, `heal_s`, ...).",
    )

    @model_validator(mode="after")
    def _both_sides_take_their_settings(self) -> Self:
        self.engine_settings("check")
        self.node_settings("check")
        return self

    def engine_settings(self, name: str) -> dict[str, Any]:
        """Return `HeadraceConnector`'s settings, for an arena of that name.

        Raises:
            ValueError: a setting is unknown or impossible; the text begins with its path.
        """
        from headrace_kvstore.settings.store_settings import StoreSettings

        own = {"dram_bytes": self._dram_bytes, **self._shared}
        return self._settings("engine", StoreSettings.parse, name, own)

    def node_settings(self, name: str) -> dict[str, Any]:
        """Return `StoreNode`'s settings, for an arena of that name.

        Raises:
            ValueError: as `engine_settings`.
        """
        from headrace_kvstore.settings.node_settings import NodeSettings

        own: dict[str, Any] = {"dram_bytes": self._dram_bytes, **self._shared}
        if self.nvme_folder is not None:
            own |= {"nvme_folder": self.nvme_folder, "nvme_bytes": int(self.nvme_gb * GIB)}
            own |= {"nvme_sync": self.nvme_sync}
        if self.object_url is not None:
            own |= {"object_url": self.object_url, "object_bytes": int(self.object_gb * GIB)}
            own |= {"object_options": self.object_options}
        return self._settings("node", NodeSettings.parse, name, own)

    @property
    def _shared(self) -> dict[str, Any]:
        """The settings of `SHARED` that are set for node or engine, for both of them."""
        given = {**self.engine, **self.node}
        return {name: given[name] for name in SHARED if given.get(name) is not None}

    @property
    def _dram_bytes(self) -> int:
        return int(self.dram_gb * GIB)

    def _settings(
        self, field: str, parse: Callable[[Mapping[str, Any]], object], name: str, own: Any
    ) -> dict[str, Any]:
        given: dict[str, Any] = getattr(self, field)
        decided = {"name": "name", "dram_bytes": "dram_gb"}
        decided |= {"nvme_folder": "nvme_folder", "nvme_bytes": "nvme_gb", "nvme_sync": "nvme_sync"}
        decided |= {"object_url": "object_url", "object_bytes": "object_gb"}
        decided |= {"object_options": "object_options"}
        for key in decided.keys() & given:
            raise ValueError(f"{field}.{key}: set store.{decided[key]} instead")
        settings = {"name": self.name or name, **own, **given}
        try:
            parse(settings)
        except ValueError as error:
            text = str(error).removeprefix("kv_connector_extra_config.")
            raise ValueError(f"{field}.{text}") from None
        return settings
