"""From a study to a run folder: assembly, run, result, comparison, prediction.

Imports studies, methods and engines; only audits, reports and commands import it."""
