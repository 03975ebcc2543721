"""Sparse attention at decode: which units of consecutive tokens a query attends to.

The modules in this folder are NumPy and numba: no Ray, no vLLM, and I/O only in `calibration_file`.
`summaries` keeps a short form of each unit's keys. `scoring` estimates from it the attention that a
query pays to each unit. `choosing` picks units. `headrace_lab.sparse.reference` computes the same
in plain torch. `kernels/` has the method as Triton kernels, and `engine/` runs it in vLLM.
"""
