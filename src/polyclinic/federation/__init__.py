"""Sites, what leaves them, and how a coordinator asks: parcel, gate, ledger, site, federation, checkpoint.

This room knows the interface of an engine (`engine.py`), never an engine; it knows no method by name.
"""
