"""Eviction policies: the choice of the blocks that a store gives up for new ones.

`base.Policy` is the interface. `LRU` and `CostAware` implement it. LFU, S3-FIFO and priorities are
measured beside them in `benchmarks/kvpolicy`; `CostAware` saves more than each at every size.
"""
