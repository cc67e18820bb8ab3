"""From one command to a table, a plot and a page: sweeps of runs, what is read off them, and the report.

    records, runs        run folders of any version, as plain values, as runs, as groups of runs
    measures, stats      what a run came to; several seeds together, and tests of a difference
    tables               cells, and how they are written as CSV, Markdown and LaTeX

    status, logs         `fedmpi status`, `cancel` and `logs`, for runs and sweeps
    sweep/               `fedmpi sweep` and `fedmpi recipes`
    report/              `fedmpi report`
    attack/              `fedmpi attack`

Nothing here takes part in a run: everything is read from run folders.
"""
