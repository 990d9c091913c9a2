"""Write docs/claims.md from the kept claim.json files.

    python docs/building/claims_page.py [two_cores.json ...]

Files of minutes on two cores that the campaign has written (`--two-cores`) are merged into the kept one first; a
measurement of a claim replaces an earlier one unless that has more seeds.
"""

import sys
from pathlib import Path

from polyclinic.claims.page import page
from polyclinic.claims.two_cores import merge

if __name__ == "__main__":
    merge([Path(name) for name in sys.argv[1:]])
    (Path(__file__).parents[1] / "claims.md").write_text(page(), encoding="utf-8")
