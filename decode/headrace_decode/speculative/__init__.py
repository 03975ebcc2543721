"""Speculative decoding without a draft model: drafts are retrieved from earlier text.

`retrieval` keeps token sequences, and returns drafts with a survival probability per token.
`planning` decides how many of them a step verifies, and `session` connects both to an engine. These
are NumPy and numba: no Ray, no vLLM, no I/O. `replication` copies the memory between replicas.
"""
