"""What a line of a ledger costs: hash-chained only, signed, and signed with the line and its anchor on disk (fsync).

The first is what a ledger was before lines were signed, the second a simulated site's, the third a deployed one's. Also
what `ledger verify` needs for a line, and the counter-signature of a head.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from polyclinic.federation.ledger.key_ring import SeedKeys
from polyclinic.federation.ledger.ledger import Ledger, verify
from polyclinic.federation.ledger.signing import AnchorFile, sign_anchor

KEYS = SeedKeys(0)


def microseconds(work: Callable[[int], object], times: int) -> float:
    """The median time of one piece of work."""
    spent = []
    for number in range(times):
        begun = time.perf_counter()
        work(number)
        spent.append(time.perf_counter() - begun)
    return round(1e6 * statistics.median(spent), 1)


def append(ledger: Ledger, number: int) -> None:
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    ledger.append(round=number, operation="train", kind="weights", bytes=1, digest=digest, to="coordinator")
    ledger.commit()


def measure(folder: Path, lines: int) -> dict[str, float]:
    key = KEYS.signing_key("north")
    chained, signed = Ledger(folder / "chained.jsonl"), Ledger(folder / "signed.jsonl", key)
    deployed = Ledger(folder / "deployed.jsonl", key, AnchorFile(folder / "anchor.json"))
    figures = {
        "chained": microseconds(lambda number: append(chained, number), lines),
        "signed": microseconds(lambda number: append(signed, number), lines),
        "signed_and_on_disk": microseconds(lambda number: append(deployed, number), lines),
    }
    assert signed.head
    begun = time.perf_counter()
    verify(folder / "signed.jsonl", KEYS.verifying_keys("north"))
    figures["verify_a_line"] = round(1e6 * (time.perf_counter() - begun) / lines, 1)
    head = signed.head
    figures["countersign"] = microseconds(lambda _: sign_anchor(key, "run", "north", head), lines)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 lines instead of 2,000")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure; a temporary one if not given")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(Path(folder), 200 if options.quick else 2000)
    for name, value in found.items():
        print(f"{name:<20} {value:>9.1f} µs")
    figures = {"benchmark": "ledger", "quick": options.quick, "microseconds": found}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
