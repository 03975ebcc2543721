"""How many prefill and decode replicas there should be.

- `forecast`: how many requests will come, and how wrong that may be
- `capacity`: what share of them so many replicas answer in time
- `decide`: the counts to have now, since a replica takes time to start
- `traffic`: means of the last requests
- `published`, `board`: what decode replicas publish, and what is known of an app
- `policy`: what Ray Serve's controller asks

Pure but for `policy`: no Ray, no vLLM, no I/O, no clock.
"""
