"""Where images come from: one file a source, and one line here.

A source may import `data` and what lies below it (`errors`, `settings`, `randomness`), never another source's file
except to share a reader.
"""

from polyclinic.data.datasets.phantoms.fundus import FundusPhantom
from polyclinic.data.source import Source

#: every source by the name that `data.source` takes
SOURCES: dict[str, type[Source]] = {
    "fundus-phantom": FundusPhantom,
}
