"""Batches: files of requests that are run when other requests leave room.

A client uploads a file of JSON lines (`routes`, `upload`), and makes a batch of it. A gateway takes
the batch by a lease (`batch_runner`), checks its lines (`batch_lines`), and sends them through the
gateway's own request path (`line_relay`), as many at once as other requests leave room for
(`line_pacer`). Each line's answer is kept before it counts (`tenant_batches`). If the gateway dies,
another one continues after its lease has expired.
"""
