"""Sparse attention at decode: which units of consecutive tokens a query attends to.

Everything here but `engine/` is NumPy, numba and torch: no Ray, no vLLM, no I/O.
`summaries` keeps a short form of each unit's keys, `scoring` estimates from it the attention that
a query pays to each unit, `choosing` picks units. `reference` says the same in plain torch.
"""
