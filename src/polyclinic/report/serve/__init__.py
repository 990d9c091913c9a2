"""`polyclinic serve`: a folder of runs, or a hospital's kit, as a local web page.

`server.py` decides who may ask at all, `places.py` which files exist for a visitor. The page is one template; its
scripts are in `static/`, and all that they show comes from `/api/...` as JSON. Only the site's page imports torch.
"""
