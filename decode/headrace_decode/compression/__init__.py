"""KV cache compression: keep a context's KV within a budget of bytes.

The modules choose the tokens that each layer and KV head keeps, and fit their keys and values. All
but `engine/` are pure: tensors in, tensors out. docs/compression.md has the method and
measurements.
"""
