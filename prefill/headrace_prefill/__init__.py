"""Making KV: the prefill deployment. Imports `headrace_kvstore` and nothing else of ours."""

__version__ = "0.1.0"
