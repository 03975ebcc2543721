"""Triton kernels that choose pages, for summaries in a basis that lie beside the KV cache on a GPU.

No module here uses vLLM. Without a GPU the kernels run in Triton's interpreter
(`TRITON_INTERPRET=1`, set before Triton is imported) on tensors in host memory.
"""
