"""Sweeps: many runs from one file.

    grid, sweepfile      a sweep as data, and the runs that it stands for; what a sweep file says
    orders, pick         what there is to do; the best learning rates, and runs without hope
    reference            what the file asks for by itself, for comparisons with published numbers
    here, crew, there    runs on this machine, their processes; runs as a job array
    presence             which processes run a sweep
    overview, command    a sweep at a glance; the command
    recipes              the bundled experiments
"""
