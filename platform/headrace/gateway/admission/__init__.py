"""The admission queue: it chooses the request to send next, and those to refuse at once.

`slo_classes` holds the SLO classes, `request_costs` predicts the engine time of a request,
`fair_queue` orders the tenants, `queue_rates` measures how fast the queue moves, `capacity`
computes the free capacity of the replicas, and `admission_controller` combines these. All of them
are pure. `admission_queue` is the asyncio part that a gateway uses.
"""
