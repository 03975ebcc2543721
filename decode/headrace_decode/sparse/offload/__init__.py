"""Which units of a request lie in the engine's memory, while the rest lie in the host's.

Pure: NumPy and numba, no vLLM, no clocks, no I/O. `engine/` moves the bytes.
"""
