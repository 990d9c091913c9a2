"""One run of a study: assembly of sites and method, the engine, what is kept in the run folder, and its result."""
