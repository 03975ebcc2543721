"""`HeadracePDConnector`: NIXL's prefill-to-decode transfer, the store, and blending, in one engine.

vLLM's MultiConnector loads from the first child that offers anything. This connector loads from the
child that offers most, and from the earlier one if they offer the same. If a remote prefill is
ready, NIXL offers the whole prompt. The connector then takes that offer at once, and does not ask
the store, which may have to ask its node and start a pull from a peer. Otherwise it takes the
larger offer, whatever the order of the children.

    kv_connector: HeadracePDConnector
    kv_connector_module_path: headrace_engine.connector.composite
    kv_connector_extra_config: {connectors: [{kv_connector: NixlConnector, ...}, {...}]}
"""

from __future__ import annotations

from typing import Any

from headrace_engine.vllm.connectors import KVConnectorFactory, MultiConnector

# MultiConnector finds the class of its children's statistics by name.
KVConnectorFactory.register_connector(
    "HeadraceConnector", "headrace_engine.store_connector", "HeadraceConnector"
)


class HeadracePDConnector(MultiConnector):
    """Several connectors; each load comes from the one that offers most.

    `_connectors` and `_requests_to_connector` are MultiConnector's own state; contract tests pin
    them.
    """

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        best, chosen = (0, False), None
        whole = request.num_prompt_tokens - 1 - num_computed_tokens  # one token may be computed
        order = range(len(self._connectors))
        for number in sorted(order, key=lambda n: getattr(self._connectors[n], "may_wait", False)):
            child = self._connectors[number]
            tokens, is_async = child.get_num_new_matched_tokens(request, num_computed_tokens)
            if tokens is None:
                return None, False
            if tokens > best[0] or (tokens == best[0] and chosen is not None and number < chosen):
                best, chosen = (tokens, is_async), number
            if 0 < whole <= tokens:
                break
        self._requests_to_connector.pop(request.request_id, None)
        if chosen is not None:
            self._requests_to_connector[request.request_id] = chosen
        return best

    def has_pending_push_work(self) -> bool:
        return any(child.has_pending_push_work() for child in self._connectors)
