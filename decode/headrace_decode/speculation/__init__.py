"""Drafting without a draft model: what was seen before, remembered, retrieved and priced.

`memory` keeps token sequences and answers drafts with a survival probability per token. Everything
here but the vLLM adapters is NumPy and numba: no Ray, no vLLM, no I/O.
"""
