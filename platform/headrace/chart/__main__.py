"""`python -m headrace.chart FOLDER` writes the chart's generated files."""

import sys
from pathlib import Path

from headrace.chart.files import write

write(Path(sys.argv[1]))
