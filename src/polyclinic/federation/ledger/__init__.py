"""Parcels, and the record of what left a site: ledger, signatures, budgets, wire, archive. Imports no layer."""
