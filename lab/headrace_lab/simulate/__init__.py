"""Additions to `headrace.simulate`: rules of other routers, admission, and autoscaling."""
