"""The sections of a report: functions that return the parts of the page that show what the runs measured."""
