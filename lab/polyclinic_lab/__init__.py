"""The laboratory of Polyclinic: claims of the five papers and of our own, with the runs that check them.

A claim is a table in `claims/`, with a study in `studies/`. It may import all of polyclinic; polyclinic imports nothing
from here and gets `polyclinic reproduce` by the entry point `polyclinic.commands`.
"""
