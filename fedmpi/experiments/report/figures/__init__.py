"""The figures of a report, drawn from plain values: curves, rows of marks, heat maps, splits. None knows of runs."""
