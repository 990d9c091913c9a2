"""Data sources: a class for each, and one line in the registry `SOURCES`.

Named datasets of one kind share a file: radiology, photographs, benchmarks of machine learning. A source may
import `data` and what lies below it (`errors`, `settings`, `randomness`), never another source.
"""

from collections.abc import Mapping
from typing import Any

from polyclinic.data.datasets.benchmarks import Cifar10, Cifar100, Mnist, Omniglot, Svhn
from polyclinic.data.datasets.folder import Folder
from polyclinic.data.datasets.npz import Npz
from polyclinic.data.datasets.phantoms.brain import BrainPhantom
from polyclinic.data.datasets.phantoms.brain_volumes import BrainVolumes
from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.data.datasets.phantoms.fundus import FundusPhantom
from polyclinic.data.datasets.phantoms.hand import HandPhantom
from polyclinic.data.datasets.phantoms.phantom import Phantom
from polyclinic.data.datasets.phantoms.skin import SkinPhantom
from polyclinic.data.datasets.photographs import Ham10000, Isic2019, KaggleRetinopathy
from polyclinic.data.datasets.radiology import Brats2017, MontgomeryShenzhen, NihChestXray, RsnaBoneAge
from polyclinic.data.datasets.table import Csv
from polyclinic.data.datasets.volume_folder import Fets, VolumeFolder
from polyclinic.data.source import AtSites, FileSource, Source
from polyclinic.data.volumes.at_sites import VolumesAtSites
from polyclinic.registry import Registry

#: every source by the name that `data.source` takes: phantoms, your own images, named datasets
SOURCES: Registry[type[Source]] = Registry(
    "polyclinic.sources",
    {
        "fundus-phantom": FundusPhantom,
        "hand-phantom": HandPhantom,
        "chest-phantom": ChestPhantom,
        "brain-phantom": BrainPhantom,
        "skin-phantom": SkinPhantom,
        "brain-volumes": BrainVolumes,
        "folder": Folder,
        "volumes": VolumeFolder,
        "csv": Csv,
        "npz": Npz,
        "kaggle-retinopathy": KaggleRetinopathy,
        "rsna-bone-age": RsnaBoneAge,
        "brats2017": Brats2017,
        "fets": Fets,
        "montgomery-shenzhen": MontgomeryShenzhen,
        "isic2019": Isic2019,
        "ham10000": Ham10000,
        "nih-chestxray": NihChestXray,
        "mnist": Mnist,
        "cifar10": Cifar10,
        "cifar100": Cifar100,
        "svhn": Svhn,
        "omniglot": Omniglot,
        "at-sites": AtSites,
        "volumes-at-sites": VolumesAtSites,
    },
    base=Source,
)


def own_settings(kind: type[Source], table: Mapping[str, Any]) -> dict[str, Any]:
    """A `[data]` table without the settings that only images of the other kind have, real ones or drawn ones.

    So a study can hold settings for both, and one word changes between them: `source`.
    """
    other = FileSource if issubclass(kind, Phantom) else Phantom if issubclass(kind, FileSource) else None
    kinds = [each for each in SOURCES.builtin.values() if other and issubclass(each, other)]
    theirs = {name for each in kinds for name in each.model_fields}
    return {name: value for name, value in table.items() if name in kind.model_fields or name not in theirs}
