"""Usage: what each request cost an engine, summed by tenant.

`request_usage` has the quantities. `scheduler_usage` counts them in the scheduler's process, and
`usage_book` sums them in the replica's.
"""
