"""Decides which units of a request are in the engine's memory. The others are in host memory.

Pure: NumPy and numba, no vLLM, no clocks, no I/O. `engine/` moves the bytes.
"""
