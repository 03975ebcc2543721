"""KV cache compression inside a vLLM engine: drops a part of the KV of long contexts."""
