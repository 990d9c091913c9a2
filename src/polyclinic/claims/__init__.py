"""Claims of the five papers, and of our own: a sentence with its numbers, the studies that check it, and a rule.

`polyclinic reproduce CLAIM` runs them. One file a paper; `claim.py` says what a claim is, `rules.py` how it is judged.
"""
