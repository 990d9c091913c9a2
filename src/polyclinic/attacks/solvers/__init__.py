"""Solvers for many independent problems in one batch: L-BFGS, Adam, and layers made for `vmap`."""
