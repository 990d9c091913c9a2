"""Your own images in a NumPy archive."""

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from polyclinic.data.allowed_paths import safe_names
from polyclinic.data.archives import Archive, Chain, Packed, as_bytes, channels_last
from polyclinic.data.listing import Listing
from polyclinic.data.source import LabelledSource
from polyclinic.data.tables import split_names
from polyclinic.errors import BadInput

PREFIXES = {"train_": "train", "val_": "validation", "test_": "test"}
#: names of arrays that differ from the settings they are for
USUAL = {"group": "patient"}
SPLITS_BY_NUMBER = ("train", "validation", "test")


class Npz(LabelledSource):
    """Your own images in an .npz archive: images, labels and optional site, split, patient, masks."""

    source: Literal["npz"] = "npz"
    images: str | None = Field(
        None, description="array of the images, or of packed JPEGs with NAME_off beside it; else images or jpeg"
    )
    labels: str | None = Field(None, description="array of the classes, or of the values to predict; else labels")
    site: str | None = Field(None, description="array of the institutions; else site if there, '' for none")
    split: str | None = Field(
        None, description="array of train/validation/test, 0/1/2, or true for test; else split if there, '' for none"
    )
    group: str | None = Field(None, description="array of the patients; else patient if there, '' for none")
    masks: str | None = Field(None, description="array of the masks; else masks if there, '' for none")
    subgroup: str | None = Field(None, description="array of a finer label inside a class; else subgroup if there")
    ids: str | None = Field(None, description="array of names to find an image by; else ids if there")

    layout: ClassVar[str] = """
        images   uint8 [N, H, W], [N, H, W, 3] or [N, 3, H, W];
                 or packed JPEGs: jpeg uint8 and jpeg_off int64 [N + 1]
        labels   [N]
        site, split, patient, masks   [N, ...], used where they are there
        label_names, site_names       names of the numbers in labels and site, used where they are there
    or the MedMNIST layout: train_images, train_labels, val_images, val_labels, test_images, test_labels.
    Other names of arrays are settings: images = "X", labels = "y", site = "hospital", group = "lesion"."""

    def listing(self) -> Listing:
        columns = Columns(Archive(self.location, self.max_pixels), self.images)
        chosen = self.kept(columns) if self.keep else np.arange(len(columns.images))
        names = self._column(columns, "ids", chosen)

        def place(i: int) -> str:
            return f"{self.location.name} image {chosen[i]}" + ("" if names is None else f" ({names[i]})")

        masks_name = self._name(columns, "masks") or (
            "mask_png" if self.masks is None and "mask_png" in columns else ""
        )
        masks = columns.pictures(masks_name) if masks_name else None
        labels, classes = self._labels(columns, chosen, place, masks is not None)
        sites = self._texts(columns, "site", chosen)
        return Listing(
            picture=lambda i: as_bytes(columns.images[chosen[i]]),
            name=place,
            labels=labels,
            classes=classes,
            unit=self.unit,
            label_range=self.label_range,
            mask=None if masks is None else lambda i: masks[chosen[i]],
            patient=self._column(columns, "group", chosen),
            site=None if sites is None else safe_names(sites),
            split=self._splits(columns, chosen, place),
            subgroup=self._texts(columns, "subgroup", chosen),
            ids=None if names is None else names.astype(str),
            columns=self.more_columns([self._named(columns, name) for name in self.columns], chosen),
            column_names=self.columns,
        )

    def _name(self, columns: "Columns", field: str) -> str:
        """The array that a setting names; else the usual one if it is there; '' for none."""
        chosen, usual = getattr(self, field), USUAL.get(field, field)
        return chosen if chosen is not None else usual if usual in columns else ""

    def _column(self, columns: "Columns", field: str, chosen: np.ndarray) -> np.ndarray | None:
        """The entries of the chosen images in the array that a setting names; None where there is none."""
        name = self._name(columns, field)
        return columns[name].reshape(-1)[chosen] if name else None

    def _texts(self, columns: "Columns", field: str, chosen: np.ndarray) -> np.ndarray | None:
        """As `_column`, with names instead of numbers where the archive has them."""
        name = self._name(columns, field)
        return self._named(columns, name)[chosen].astype(str) if name else None

    def _named(self, columns: "Columns", name: str) -> np.ndarray:
        """One of the arrays of `data.columns`, with names instead of numbers where the archive has them."""
        values, names = columns[name].reshape(-1), columns.names_of(name)
        return values if names is None else names[values]

    def _labels(
        self, columns: "Columns", chosen: np.ndarray, place: Callable[[int], str], has_masks: bool
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        name = self._name(columns, "labels")
        if isinstance(self.several, tuple) and name:
            rows = columns.rows_of(name)
            if rows.shape != (len(columns.images), len(self.several)):
                raise BadInput(f"data.several: names {len(self.several)} columns, and '{name}' has others; name each")
            return self.targets(rows[chosen], place)
        values = self._column(columns, "labels", chosen)
        if values is not None:
            return self.targets(values, place, columns.names_of(self._name(columns, "labels")))
        if not has_masks:
            raise BadInput(f"{self.location}: there is no array 'labels'; name one of {', '.join(columns)}")
        return np.zeros(len(chosen), dtype=np.int64), ("image",)

    def _splits(self, columns: "Columns", chosen: np.ndarray, place: Callable[[int], str]) -> np.ndarray | None:
        values = self._column(columns, "split", chosen)
        if values is None:
            return None if columns.prefixes == [""] or self.split == "" else columns.splits()[chosen]
        if values.dtype == np.bool_:
            return np.where(values, "test", "train")
        if np.issubdtype(values.dtype, np.integer):
            names = np.array(SPLITS_BY_NUMBER)
            if not np.isin(values, range(len(names))).all():
                raise BadInput(f"data.split: '{self.split}' must be 0 (train), 1 (validation) or 2 (test)")
            return names[values]
        return split_names(values, [place(i) for i in range(len(values))])


class Columns(Mapping[str, np.ndarray]):
    """The arrays of an archive; train_x, val_x and test_x are put one behind the other as x."""

    def __init__(self, archive: Archive, images: str | None) -> None:
        self.archive = archive
        name = images or ("jpeg" if "jpeg" in archive and "images" not in archive else "images")
        self.prefixes = [prefix for prefix in PREFIXES if prefix + name in archive] or [""]
        self.images = self.pictures(name)

    def __iter__(self) -> Iterator[str]:
        prefix = self.prefixes[0]
        return (name.removeprefix(prefix) for name in self.archive if name.startswith(prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return all(f"{prefix}{name}" in self.archive for prefix in self.prefixes)

    def rows_of(self, name: str) -> np.ndarray:
        """An array as it is: several numbers for each image, perhaps."""
        return np.concatenate(self._parts(name))

    def __getitem__(self, name: str) -> np.ndarray:
        values = self.rows_of(name)
        if values.ndim == 2 and values.shape[1] > 1 and len(values) == len(self.images):
            raise BadInput(
                f"{self.archive.file}: '{name}' has {values.shape[1]} numbers for each image, and one is taken; save "
                "the number of each image's class as an array [N]"
            )
        if values.size != len(self.images):
            raise BadInput(f"{self.archive.file}: '{name}' has {values.size} entries for {len(self.images)} images")
        return values

    def pictures(self, name: str) -> Chain:
        """Images or masks one by one, unpacked where they are packed pictures."""
        off = "jpeg_off" if name == "jpeg" else "mask_off" if name == "mask_png" else f"{name}_off"
        if off in self:
            packed = zip(self._parts(name), self._parts(off), strict=True)
            return Chain([Packed(data, offsets, self.archive.max_pixels) for data, offsets in packed])
        return Chain([channels_last(part, f"{self.archive.file}: '{name}'") for part in self._parts(name)])

    def names_of(self, name: str) -> np.ndarray | None:
        """The array that names the numbers of another: label_names for labels, site_names for site."""
        for candidate in (f"{name}_names", f"{name.removesuffix('s')}_names"):
            if name and candidate in self.archive:
                return self.archive[candidate]
        return None

    def splits(self) -> np.ndarray:
        """The split that each image's prefix stands for."""
        return np.repeat([PREFIXES[prefix] for prefix in self.prefixes], self.images.lengths)

    def _parts(self, name: str) -> list[np.ndarray]:
        return [self.archive[prefix + name] for prefix in self.prefixes]
