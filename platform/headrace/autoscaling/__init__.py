"""Autoscaling: computes how many prefill and decode replicas an app should have.

- `forecast`: forecast of the request rate, and its error
- `capacity`: share of the requests that a number of replicas answers in time
- `decide`: the counts to have now, since a replica takes time to start
- `traffic`: means of the last requests
- `published`, `board`: the decode replicas' metrics, and the state of an app
- `policy`: the policy that Ray Serve's controller calls

Pure except for `policy`: no Ray, no vLLM, no I/O, no clock.
"""
