"""Studies across institutions: what coordinator and sites run under NVFlare, and how a federation is set up.

This room knows runs, studies and the NVFlare engine; nobody but `run`, `audit` and the command line knows it.
"""
