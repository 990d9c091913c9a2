"""The dossier of a run for whoever decides about its release: evidence, and no claim that a rule is met.

`writing` makes the folder, `verification` finds any change in it; `figures` says where each figure comes from. What
stands in it is in templates/dossier_sections.html and templates/data_sheet.md.
"""
