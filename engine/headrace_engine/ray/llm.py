"""The platform's uses of Ray beyond its public API. An upgrade of Ray breaks this file first.

`PDServingArgs` is the schema of `ray.serve.llm:build_pd_openai_app`, whose arguments we accept
whole; the other two build Ray's classic and direct ingress, which stay a configuration switch.
`tests/unit/test_contracts.py` pins what is used here.
"""

from ray.llm._internal.common.dict_utils import maybe_apply_llm_deployment_config_defaults
from ray.llm._internal.serve.core.configs.openai_api_models import to_model_metadata
from ray.llm._internal.serve.core.ingress.builder import (
    _build_direct_streaming_llm_deployment as build_direct_streaming_deployment,
)
from ray.llm._internal.serve.core.ingress.builder import (
    _build_openai_ingress_request_router as build_ingress_request_router,
)
from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs
from ray.serve.deployment import Application


def with_ingress_request_router(app: Application, router: Application) -> Application:
    """Attach the router that HAProxy asks where a request goes."""
    return app._with_ingress_request_router(router)


__all__ = [
    "PDServingArgs",
    "build_direct_streaming_deployment",
    "build_ingress_request_router",
    "maybe_apply_llm_deployment_config_defaults",
    "to_model_metadata",
    "with_ingress_request_router",
]
