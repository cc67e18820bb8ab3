"""The sections of a report. Each shows what the runs measured, and says in a sentence what they did not."""
