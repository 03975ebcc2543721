"""Autoscaling: computes how many prefill and decode replicas an app should have.

- `forecast`: forecast of the request rate, and its error
- `capacity`: share of the requests that a number of replicas answers in time
- `replica_counts`: the counts to have now, since a replica takes time to start
- `load_average`: means of the last requests
- `replica_metrics`, `autoscaler_state`: the decode replicas' metrics, and the state of an app
- `serve_policy`: the policy that Ray Serve's controller calls

Pure except for `serve_policy`: no Ray, no vLLM, no I/O, no clock.
"""
