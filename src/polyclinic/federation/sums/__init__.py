"""Sums over the sites: whole numbers (fixed point), and secure sums, of which the coordinator learns the total only.

Both halves of a sum live here, the site's (`site_sums.py`) and the coordinator's (`coordinator_sums.py`). They know
parcels, keys and calls; they know no method.
"""
