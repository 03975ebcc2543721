"""The prefill deployment, which makes KV. It imports `headrace_engine` and `headrace_kvstore`."""

__version__ = "0.1.0"
