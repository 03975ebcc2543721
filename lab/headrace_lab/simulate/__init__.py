"""Additions to `headrace.simulate`: rules of other routers, admission, and replicas that scale."""
