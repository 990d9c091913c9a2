"""The dossier of a run for whoever decides about its release: evidence, and no claim that a rule is met.

`writing` makes the folder, `verification` finds any change in it; `sections` says what stands in it, `figures` where
each figure comes from, `page` how it looks.
"""
