"""What a released parcel gives away: one file an attack, and the parts that attacks are built from.

Attacks know parcels, networks and public knowledge; they know no method, no site and never the truth, which enters
the scoring alone.
"""
