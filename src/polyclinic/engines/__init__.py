"""Engines carry calls to sites: one file an engine, each with the interface of `federation/engine.py`.

Engines know federation and processes; they know no method and no study.
"""
