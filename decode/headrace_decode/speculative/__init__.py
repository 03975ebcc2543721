"""Speculative decoding without a draft model: drafts are retrieved from earlier text.

`retrieval` keeps token sequences, and returns drafts with a survival probability per token.
Everything here except the vLLM adapters and `sharing` is NumPy and numba: no Ray, no vLLM, no I/O.
"""
