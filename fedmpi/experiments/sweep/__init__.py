"""Sweeps: many runs from one file.

grid, sweepfile      a sweep as data and its runs; the sweep file
plan, pick           the runs to make; choosing the best labels, and giving up runs that fall behind
reference            the configuration of the file itself, for comparisons with published numbers
local, slurm         runs on this machine, and runs as a job array
overview, command    the status of a sweep; the command
recipes              the bundled experiments
"""
