"""Which request a gateway sends to the replicas next, and which it refuses at once.

`classes` says what requests want, `costs` what they take, `fair` whose turn it is, `rates` how fast
the queue moves, `room` what the replicas can take, `admission` puts these together. All of them are
pure. `door` is the asyncio part that a gateway uses.
"""
