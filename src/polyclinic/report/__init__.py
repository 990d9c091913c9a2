"""Pages for people, instead of files: the report of a run, and the local web page (`serve/`)."""
