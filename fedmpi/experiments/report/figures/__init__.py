"""The pictures of a report, from plain records: curves, rows of marks, heat maps. None of them knows of runs."""
