"""The sections of a report: a file for each group of charts."""
