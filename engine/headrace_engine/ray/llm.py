"""The platform's use of Ray Serve LLM beyond its public API.

`PDServingArgs` is the schema of `ray.serve.llm:build_pd_openai_app`, whose arguments we accept
whole. `tests/unit/test_contracts.py` pins what is used here.
"""

from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs

__all__ = ["PDServingArgs"]
