"""The `kvpool` command: what a model's cache costs, and how many requests fit.

`main.py` reads arguments, `report.py` works out the figures, `tables.py` and `chart.py` show them.
"""

from kvpool.cli.main import main

__all__ = ["main"]
