"""Triton kernels that choose units, for summaries in a basis that lie beside the KV cache on a GPU.

Only `_vllm_compat` uses vLLM. Without a GPU the kernels run in Triton's interpreter
(`TRITON_INTERPRET=1`, set before Triton is imported) on tensors in host memory.
"""
