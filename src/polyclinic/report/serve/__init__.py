"""`polyclinic serve`: a folder of runs, or a hospital's kit, as a local web page.

`guard.py` decides who may ask at all, `places.py` which files exist for a visitor. The pages are plain files in
`static/`, and everything they show comes from `/api/...` as JSON. Nothing here imports torch but the site's page.
"""
