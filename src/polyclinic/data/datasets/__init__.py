"""Where images come from: one file a source, and one line here.

A source may import `data` and what lies below it (`errors`, `settings`, `randomness`), never another source
except to share a reader.
"""

from polyclinic.data.datasets.folder import Folder
from polyclinic.data.datasets.npz import Npz
from polyclinic.data.datasets.phantoms.fundus import FundusPhantom
from polyclinic.data.datasets.table import Csv
from polyclinic.data.source import Source

#: every source by the name that `data.source` takes
SOURCES: dict[str, type[Source]] = {
    "folder": Folder,
    "csv": Csv,
    "npz": Npz,
    "fundus-phantom": FundusPhantom,
}
