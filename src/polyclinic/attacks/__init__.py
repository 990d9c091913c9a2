"""Attacks on released parcels: one file an attack, and the solvers and networks that attacks are built from.

Attacks know parcels, networks and public knowledge; they know no method, no site and never the truth, which enters
the scoring alone.
"""
