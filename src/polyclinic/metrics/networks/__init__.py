"""Networks with public weights that metrics measure with."""
