"""Attacks of a coordinator that chooses weights: one file an attack, and `crafting.py`, from which they are built.

They run no code at a site. `craft` makes a network whose weights are sent; `recover` reads what a site answers.
"""
