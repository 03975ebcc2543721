"""The adapter of Ray: the only package that uses Ray beyond its public API.

    engine  Ray's vLLM engine class, extended: metered steps, ports for handshakes
    llm     building blocks of `ray.serve.llm:build_pd_openai_app`
    serve   facts of a replica's deployment, and values that all processes of a cluster share

`tests/unit/test_imports.py` checks the rule.
"""
