"""Simulates a cluster on a trace: discrete events over the router's own placement code.

- `trace`: reads traces, and makes the requests of a run
- `hardware`, `calibration`: the machines' performance
- `state`, `block_pool`, `request_kv`: the engines and their caches, as arrays
- `scheduler`, `prefill_admission`, `engine`, `event_loop`: steps and the clock, compiled
- `cluster_state`, `known_blocks`: the router's delayed view
- `headrace_policy`, `policies`, `policy_catalog`: placement rules; other packages may add rules
- `other_routers`: the rules of other routers
- `scenarios`: admission at the gateway, and a number of engines that changes
- `run`, `outcome`, `best_case`, `html_report`: a run and its figures

Pure: no Ray, no vLLM, and no I/O except for reading a trace.
"""
