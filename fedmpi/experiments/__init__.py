"""From one command to a table, a plot and a page: sweeps of runs, what is read off them, and the report.

    grid      what a sweep file says, and the runs that it stands for
    sweep     runs them, here or as a job array; what is finished stays, what is broken runs again
    pick      the best learning rates, and runs without hope
    runs      run folders of any version, as records
    stats     means, deviations, tests of a difference
    tables    CSV, Markdown, LaTeX
    figures   the pictures
    page      one page of HTML that holds them all
    report    the command that puts these together
    attack    membership inference against a finished run
    recipes   the bundled experiments

Nothing here takes part in a run: everything is read from run folders.
"""
