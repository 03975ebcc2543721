"""Foundations that sparse attention and KV cache compression share: the layout of the CPU cache and
its pages, calibration files, settings, and KV that leaves the cache (`offload/`).

No module here imports a technique.
"""
