"""What the fuzz campaign changes and reads: studies, parcels, calls, ledgers, manifests, models, tables, images."""

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from polyclinic.data.archives import Archive
from polyclinic.data.datasets.npz import Npz
from polyclinic.data.reading import Reader
from polyclinic.data.tables import read_table
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.checkpoint import Checkpoint, Manifest
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import GENESIS, AnchorFile, Ledger, LedgerBroken, verify
from polyclinic.federation.ledger.parcel import Parcel, decode, shortened
from polyclinic.files import digest_of, read_json, read_tensors, write_tensors
from polyclinic.report.serve.run_files import RunFiles
from polyclinic.run_folder import DIGESTS, check_whole, note_files
from polyclinic.runner.evaluate.case_scores import read_cases
from polyclinic.runner.predict.model_file import MODEL, read_model_file
from polyclinic.runner.run.result_display import history_rows
from polyclinic.runner.run.run import run
from polyclinic.study import load_study, parse_study

#: the project's own words for input that cannot be used
REFUSALS = (BadInput, WorkFailed, ParcelRejected, LedgerBroken)


#: weights that both ends have
BASE = {"w": torch.linspace(-1, 1, 1200).reshape(30, 40)}


@dataclass(frozen=True)
class Target:
    """Something that reads: a valid sample (bytes, several, or tables), and the function that gets a changed one."""

    name: str
    sample: Any
    read: Callable[[Any], object]
    #: by how much fewer inputs it gets, as one of them takes so much longer
    slowness: int = 1
    #: whether values of the JSON inside it are changed, too
    structured: bool = False
    #: writes the digests of changed lines of JSON anew, as somebody would who can write the file
    repair: Callable[[list[Any]], list[Any]] | None = None


TABLES: dict[str, Any] = {
    "seed": 1,
    "data": {"source": "fundus-phantom", "samples": 48, "size": 28},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "classification"},
    "model": {"backbone": "lenet5"},
    "optimizer": {"name": "sgd", "batch_size": 8, "lr": 0.05},
    "method": {"name": "fedavg", "rounds": 1},
    "evaluation": {"select": "last", "every": 1},
    "engine": {"workers": 1, "device": "cpu", "durable": False},
}


def targets_in(folder: Path) -> list[Target]:
    """All targets; they write what they read into the folder."""
    study = parse_study(TABLES)
    done = run(study, folder / "run", cache=folder / "cache").folder
    parcel = Parcel("weights", {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}, {"samples": 3, "loss": 0.5})
    call = Call("north", "train", 1, {"weights": parcel}, {"split": "test"})
    of_file = FileTargets(folder / "fuzzed")
    targets = [
        Target("study", TABLES, parse_study, 4),
        of_file.target("study file", "s.toml", study.to_toml().encode(), load_study, 8),
        Target("parcel", parcel.encoded, decode, structured=True),
        Target("rounded parcel", _on_wire("int8"), decode, structured=True),
        Target("difference", _on_wire("delta"), lambda data: decode(data, base=BASE), structured=True),
        Target("call", call.to_bytes(), Call.from_bytes, structured=True),
        Target("reply", Reply("north", (parcel,)).to_bytes(), Reply.from_bytes, structured=True),
        of_file.target("ledger", "l.jsonl", _ledger(folder), _open_ledger, repair=_chained),
        of_file.target("anchor", "r.json", _anchor(folder), AnchorFile),
        of_file.target("manifest", "checkpoint/manifest.json", _manifest(folder), _load_checkpoint, repair=_noted),
        of_file.target("state", "state.safetensors", _state(folder), read_tensors),
        of_file.target("result", "result.json", (done / "result.json").read_bytes(), read_json),
        of_file.target("digests", DIGESTS, _digests(done), _check_digests, repair=_noted_files),
        of_file.target("history", "history.jsonl", (done / "history.jsonl").read_bytes(), _read_history),
        of_file.target("model", "m.safetensors", (done / MODEL).read_bytes(), read_model_file, 20),
        of_file.target("cases", "cases/test.npz", (done / "cases" / "test.npz").read_bytes(), _cases, 4),
        of_file.target("table", "t.csv", b"image,label,site\na.png,1,x\nb.png,0,y\n", lambda path: read_table(path)),
        of_file.target("archive", "a.npz", _archive(), _read_archive, 4),
        *_images(of_file),
    ]
    for state in (folder / "checkpoint").glob("*.safetensors"):  # what the manifest names
        shutil.copy(state, of_file.folder / "manifest" / "checkpoint")
    shutil.copy(done / "result.json", of_file.folder / "digests")
    for target in targets:  # a reader that refuses everything would never fail
        target.read(target.sample)
    return targets


class FileTargets:
    """Targets that read a file: each gets one of its own, written anew for every input."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def target(
        self,
        name: str,
        file: str,
        sample: bytes,
        read: Callable[[Path], object],
        slowness: int = 1,
        repair: Callable[[list[Any]], list[Any]] | None = None,
    ) -> Target:
        path = self.folder / name / file
        path.parent.mkdir(parents=True)

        def written(content: bytes) -> object:
            path.write_bytes(content)
            return read(path)

        structured = file.endswith((".json", ".jsonl", ".safetensors"))
        return Target(name, sample, written, slowness, structured, repair)


def _ledger(folder: Path) -> bytes:
    ledger = Ledger(folder / "ledger.jsonl")
    for number in range(3):
        ledger.append(round=1, operation="train", kind="weights", bytes=9, digest=f"{number:064d}", to="coordinator")
    return ledger.path.read_bytes()


def _anchor(folder: Path) -> bytes:
    ledger = Ledger(folder / "ledger.jsonl")
    AnchorFile(folder / "anchor.json").keep(head=ledger.head)
    return (folder / "anchor.json").read_bytes()


def _manifest(folder: Path) -> bytes:
    checkpoint = Checkpoint(folder / "checkpoint")
    checkpoint.save(Manifest(round=2, plain={"state": {"a": 1}}), {"state.weights": {"a": torch.ones(3)}})
    return checkpoint.path.read_bytes()


def _state(folder: Path) -> bytes:
    write_tensors(folder / "state.safetensors", {"a": torch.ones(3, 2), "b": torch.zeros(1, dtype=torch.int64)})
    return (folder / "state.safetensors").read_bytes()


def _digests(done: Path) -> bytes:
    note_files(done)
    return (done / DIGESTS).read_bytes()


def _cases(path: Path) -> object:
    return read_cases(path.parent.parent, "test")


def _on_wire(encoding: Any) -> bytes:
    """Weights as they travel with `engine.wire`."""
    return shortened(Parcel("weights", {"w": BASE["w"] * 1.01, "b": torch.ones(2)}), encoding, BASE).encoded


def _open_ledger(path: Path) -> object:
    verify(path)
    return Ledger(path).head


def _chained(lines: list[Any]) -> list[Any]:
    """The lines with indices, predecessors and digests as somebody writes them who knows the format but has no key."""
    previous = GENESIS
    for number, line in enumerate(line for line in lines if isinstance(line, dict)):
        line |= {"index": number, "previous": previous}
        content = {name: value for name, value in line.items() if name not in ("digest_of_line", "signature")}
        previous = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        line["digest_of_line"] = previous
    return lines


def _noted(lines: list[Any]) -> list[Any]:
    """A manifest with the digest of what it says now."""
    [content] = lines
    if isinstance(content, dict):
        content.pop("sha256", None)
        content["sha256"] = digest_of(content)
    return lines


def _noted_files(lines: list[Any]) -> list[Any]:
    if isinstance(lines[0], dict):
        lines[0]["sha256"] = digest_of(lines[0].get("files"))
    return lines


def _load_checkpoint(path: Path) -> object:
    return Checkpoint(path.parent).load()


def _check_digests(path: Path) -> object:
    return check_whole(path.parent, "result.json")


def _read_history(path: Path) -> object:
    return history_rows(path), RunFiles(path.parent).summary()


def _archive() -> bytes:
    packed = io.BytesIO()
    images = np.zeros((4, 5, 5), np.uint8)
    np.savez(packed, images=images, labels=np.array([0, 1, 0, 1]), site=np.array(["a", "a", "b", "b"]))
    return packed.getvalue()


def _read_archive(path: Path) -> object:
    [Archive(path)[name] for name in Archive(path)]
    return Npz(path=str(path), size=28).listing()


def _images(of_file: FileTargets) -> list[Target]:
    """Pictures, DICOM and NIfTI. Their caller takes any exception of a decoder as a fact about the file."""
    values = np.random.default_rng(0).integers(0, 255, (12, 10, 3), dtype=np.uint8)
    found = []
    for kind in ("png", "jpeg", "tiff", "bmp", "gif", "webp", "ppm"):
        packed = io.BytesIO()
        Image.fromarray(values).save(packed, kind)
        found.append(of_file.target(f"image {kind}", f"i.{kind}", packed.getvalue(), _pixels))
    found.append(of_file.target("image dicom", "i.dcm", _dicom(values[..., 0]), _pixels, 4))
    found.append(of_file.target("image nifti", "i.nii", _nifti(values), _pixels, 4))
    return found


def _pixels(path: Path) -> object:
    try:
        return Reader().pixels(path)
    except MemoryError:
        raise
    except Exception as error:
        raise BadInput(str(error)) from None


def _dicom(pixels: np.ndarray) -> bytes:
    import pydicom
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    meta = pydicom.dataset.FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=["fuzz"])
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    image = pydicom.dataset.FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
    image.Rows, image.Columns = pixels.shape
    image.SamplesPerPixel, image.PhotometricInterpretation = 1, "MONOCHROME2"
    image.BitsAllocated = image.BitsStored = 8
    image.HighBit, image.PixelRepresentation = 7, 0
    image.PixelData = pixels.tobytes()
    packed = io.BytesIO()
    image.save_as(packed, enforce_file_format=True)
    return packed.getvalue()


def _nifti(values: np.ndarray) -> bytes:
    import nibabel

    return nibabel.Nifti1Image(values.astype(np.int16), np.eye(4)).to_bytes()
