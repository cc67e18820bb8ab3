"""From one command to a table, a plot and a page: sweeps of runs, what is read off them, and the report.

    sweepfile, grid      what a sweep file says; a sweep as data, and the runs that it stands for
    orders, pick         what there is to do; the best learning rates, and runs without hope
    here, crew, there    runs on this machine, their processes; runs as a job array
    overview, sweep      a sweep at a glance; the command
    recipes              the bundled experiments

    records, runs        run folders of any version, as plain values, as runs, as groups of runs
    measures, stats      what a run came to; several seeds together, and tests of a difference
    tables               cells, and how they are written as CSV, Markdown and LaTeX
    results, arms        the tables of a report; AVG beside GMA
    figures/, arrange    pictures, and who gets which panel and look
    sections/            the parts of the page
    page, sheet, binder  the page, its style, its folder
    report               the command that puts these together

    rebuild, answers     a finished run's model and data again, and what it says of samples
    attackers, attack    membership inference; the command

Nothing here takes part in a run: everything is read from run folders.
"""
