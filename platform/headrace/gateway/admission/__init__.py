"""The admission queue: it chooses the request to send next, and those to refuse at once.

`classes` holds the SLO classes, `costs` predicts the engine time of a request, `fair` orders the
tenants, `rates` measures how fast the queue moves, `room` computes the free capacity of the
replicas, and `admission` combines these. All of them are pure. `door` is the asyncio part that a
gateway uses.
"""
