"""The sections of a report, each made from the runs at hand: what it shows where it was measured, and one sentence
about what is missing where it was not."""
