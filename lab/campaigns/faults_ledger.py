"""A loss of power while a deployed site writes its ledger: no line is lost of a parcel that left."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from faults_children import Trial, in_child, tail
from faults_storage import Disk, watch_changes

from polyclinic.federation.ledger.ledger import AnchorFile, Ledger, LedgerBroken

#: parcels that leave in one recording
PARCELS = 4


def cut_ledger(place: Path, draw: random.Random) -> Iterator[Trial]:
    """Record a ledger with its anchor, and open what each cut left."""
    images, seed = place / "images", draw.random()
    outcome = in_child(lambda: _record(place / "kit", images, random.Random(seed)))
    if outcome.code:
        yield Trial("power cuts at a site", "the recording", "traceback", tail(outcome))
    for image in sorted(images.glob("*-cut")):
        left = int(image.name.split("-")[1])
        found: list[str] = []
        yield Trial("power cuts at a site", f"{left} parcels had left", _lost(image, left, found), "".join(found))
    shutil.rmtree(place)


def _record(kit: Path, images: Path, draw: random.Random) -> int:
    kit.mkdir(parents=True)
    images.mkdir()
    disk, left, busy, count = Disk(kit), [0], [], [0]

    def act(change: str) -> None:
        if busy:
            return
        busy.append(change)
        disk.note_names()
        count[0] += 1
        disk.after_cut(images / f"{count[0]:03d}-{left[0]}-cut", draw)
        busy.clear()

    watch_changes(kit, act)
    ledger = _opened(kit)
    for number in range(PARCELS):
        ledger.append(round=1, operation="train", kind="weights", bytes=1, digest=f"{number:064d}", to="coordinator")
        ledger.commit()
        left[0] += 1  # from here on the parcel may be anywhere
        act("left")
    return 0


def _opened(kit: Path) -> Ledger:
    return Ledger(kit / "runs" / "r" / "ledger" / "north.jsonl", anchor=AnchorFile(kit / "anchors" / "runs" / "r.json"))


def _lost(kit: Path, left: int, words: list[str]) -> str:
    try:
        lines = _opened(kit).position.lines
    except LedgerBroken as error:  # it says so: a person looks
        words.append(str(error))
        return ""
    return "" if lines >= left else f"the ledger has {lines} lines"
