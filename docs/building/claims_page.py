"""Write docs/claims.md from the kept claim.json files: `python docs/building/claims_page.py`."""

from pathlib import Path

from polyclinic.claims.page import page

if __name__ == "__main__":
    (Path(__file__).parents[1] / "claims.md").write_text(page(), encoding="utf-8")
