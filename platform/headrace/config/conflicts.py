"""Checks of values of `AppSection` that are valid one by one but cannot work together.

They hold for every way to start the app, so both `build_app` and the configuration file's checks
call them. Each problem is (path of the field, what is wrong and what would be right).
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.gateway import GatewaySettings
from headrace.config.store import StoreSection
from headrace.config.techniques import TechniquesSection

Problem = tuple[str, str]


def endpoint_conflicts(gateway: GatewaySettings) -> Iterator[Problem]:
    """Yield the problem of an endpoint that other machines reach without API keys, client
    certificates or `insecure`."""
    closed = gateway.loopback or gateway.tls_client_ca_file is not None
    if closed or gateway.port is None or gateway.asks_for_keys or gateway.insecure:
        return
    yield (
        "gateway.host",
        f"listens on {gateway.host} without API keys, so anyone who reaches this machine could use "
        "the model; set gateway.api_keys_file (`headrace keys add` makes one), or host: 127.0.0.1, "
        "or gateway.insecure: true",
    )


def technique_conflicts(techniques: TechniquesSection, store: StoreSection) -> Iterator[Problem]:
    """Yield the problems of techniques and store. Blending needs a store of exact KV. Sparse
    attention and compression store keys in another order, in pages of the same size."""
    codec = store.engine.get("codec", "raw")
    sparse, blending = techniques.sparse, techniques.blending.mode != "off"
    if blending and not store.enabled:
        yield (
            "techniques.blending.mode",
            "blended KV comes from the store; set store.enabled: true",
        )
    elif blending and codec != "raw":
        yield (
            "techniques.blending.mode",
            f'keys under the codec "{codec}" cannot be moved; set store.engine.codec: raw',
        )
    modes = {"sparse": sparse.mode, "compression": techniques.compression.mode}
    used = [name for name, mode in modes.items() if mode != "off"]
    if not used:
        return
    if store.enabled and codec != "raw":
        yield (
            f"techniques.{used[0]}.mode",
            f'the codec "{codec}" does not know the order of its keys; set store.engine.codec: raw',
        )
    if blending and sparse.page_tokens != 32:
        yield (
            "techniques.sparse.page_tokens",
            f"blending does not know the order of keys in pages of {sparse.page_tokens}; set it "
            "to 32, or techniques.blending.mode: off",
        )
    if blending and sparse.offload_gib:
        yield (
            "techniques.sparse.offload_gib",
            "blending corrects KV in the cache; set it to 0, or techniques.blending.mode: off",
        )
