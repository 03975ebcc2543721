"""Sparse attention at decode: which pages of consecutive tokens a query attends to.

The modules in this folder are NumPy and numba: no Ray, no vLLM, no I/O.
`summaries` keeps a short form of each page's keys. `page_scores` estimates from it the attention
that a query pays to each page. `page_selection` chooses pages. `headrace_lab.sparse.reference`
computes the same in plain torch. `kernels/` has the method as Triton kernels, and `engine/` runs it
in vLLM.
"""
