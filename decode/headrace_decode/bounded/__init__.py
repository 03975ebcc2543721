"""KV of a context within a budget of bytes: which tokens each layer and KV head keeps, and with
what values. Pure: tensors in, tensors out. docs/bounded.md has the method and its measurements."""
