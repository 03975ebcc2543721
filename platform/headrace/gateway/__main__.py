"""`python -m headrace.gateway` prints docs/rest.md."""

import os
import sys


def main() -> None:
    """Print the page."""
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # vLLM logs to the standard output
    from headrace.gateway.backend import GatewayOptions
    from headrace.gateway.docs import render
    from headrace.gateway.openapi import openapi_document
    from headrace_decode._vllm_compat import application_without_engine, vllm_version
    from headrace_decode.routes import public_routes

    application = application_without_engine()
    document = openapi_document(
        "1",
        GatewayOptions(),
        keys_on=True,
        routes=public_routes(application),
        replica=application.openapi(),
    )
    sys.stdout.write(render(document, vllm_version()))


main()
