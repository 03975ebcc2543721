"""Makes the files of the repository that follow from the code: pages, chart, dashboards, alerts.

`python -m scripts.generate` writes them. It needs the extra `dev`.
"""
