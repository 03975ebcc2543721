"""`headrace doctor`: checks a machine or a pod for problems, and prints a remedy for each.

`headrace.cli.probes` measures. `machine` and `pod` choose the checks; the modules beside them
decide, on plain values, what a measurement means; `command` runs them and shows the findings.
"""

from headrace.cli.doctor.command import doctor
from headrace.cli.doctor.finding import Finding

__all__ = ["Finding", "doctor"]
