"""What people look at instead of reading files: the report of a run, and the local web page (`serve/`)."""
