"""Runs as processes and jobs: ranks of one machine, Slurm jobs and arrays, local jobs, their status."""
