"""Writing small medical files for the tests."""

from pathlib import Path

import nibabel
import numpy as np
import pydicom
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid


def write_dicom(file: Path, values: np.ndarray, **tags) -> Path:
    """A small grey DICOM file with the given stored values and tags."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header = FileDataset(str(file), {}, file_meta=meta, preamble=b"\0" * 128)
    header.SOPClassUID, header.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    header.Rows, header.Columns = values.shape[-2:]
    header.SamplesPerPixel, header.PhotometricInterpretation = 1, "MONOCHROME2"
    header.BitsAllocated = header.BitsStored = values.dtype.itemsize * 8
    header.HighBit, header.PixelRepresentation = header.BitsStored - 1, int(values.dtype.kind == "i")
    if values.ndim == 3:
        header.NumberOfFrames = len(values)
    for name, value in tags.items():
        setattr(header, name, value)
    header.PixelData = values.tobytes()
    pydicom.dcmwrite(file, header, enforce_file_format=True)
    return file


def write_nifti(file: Path, voxels: np.ndarray, flips=(1, 1, 1)) -> Path:
    """A volume whose axes grow to the right, front and head, or against them where a flip is -1."""
    nibabel.save(nibabel.Nifti1Image(voxels, np.diag([*flips, 1.0])), file)
    return file
