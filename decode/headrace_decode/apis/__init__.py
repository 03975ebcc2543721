"""The APIs that clients call, as they expect them where vLLM's application differs."""
