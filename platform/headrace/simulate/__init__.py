"""Simulates a cluster on a trace: discrete events over the router's own placement code.

- `trace`: reads traces, and makes a run's requests of them
- `hardware`, `calibrate`: what the machines can do
- `state`, `blocks`, `kv`, `engine`, `loop`: the engines, their caches and the clock, compiled
- `sight`, `known`: what a router sees, a little late
- `policies`, `ours`, `catalog`: placement rules; other packages add theirs
- `run`, `outcome`, `report`: a run and its figures

Pure: no Ray, no vLLM, and no I/O but for reading a trace.
"""
