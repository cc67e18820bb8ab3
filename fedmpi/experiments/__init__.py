"""Experiments: sweeps of runs, their evaluation, and the report.

    records, runs        run folders of any version: plain values, runs, groups of runs
    measures, stats      measures of a run; statistics over seeds and tests of differences
    tables               cells, and tables as CSV, Markdown and LaTeX
    sweep/               `fedmpi sweep` and `fedmpi recipes`
    report/              `fedmpi report`
    attack/              `fedmpi attack`

Nothing here takes part in a run: everything is read from run folders.
"""
