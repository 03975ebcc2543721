"""The rule as Triton kernels, for summaries in a basis that lie beside the KV cache on a GPU.

Nothing of vLLM or of an engine is in here. Without a GPU the kernels run in Triton's interpreter
(`TRITON_INTERPRET=1`, set before Triton is imported) on tensors in host memory.
"""
