"""Simulates a cluster on a trace: discrete events over the router's own placement code.

- `trace`: reads traces, and makes the requests of a run
- `hardware`, `calibrate`: the machines' performance
- `state`, `blocks`, `kv`, `engine`, `loop`: the engines, their caches and the clock, compiled
- `sight`, `known`: the router's delayed view
- `policies`, `ours`, `catalog`: placement rules; other packages may add rules
- `run`, `outcome`, `report`: a run and its figures

Pure: no Ray, no vLLM, and no I/O except for reading a trace.
"""
