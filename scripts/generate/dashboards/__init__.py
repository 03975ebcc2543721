"""Grafana dashboards and Prometheus alerts, and the files that the chart carries of them.

`python -m scripts.generate` writes the files; see `files`.
"""
