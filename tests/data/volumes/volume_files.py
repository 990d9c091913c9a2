"""Writing small volumes for the tests."""

import nibabel
import numpy as np
from medical_files import write_dicom

SPACING = (1.0, 2.0, 3.0)


def save(path, voxels, affine=None):
    """A NIfTI file with voxels of 1 x 2 x 3 mm unless the affine says otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, np.diag([*SPACING, 1.0]) if affine is None else affine), path)
    return path


def write_series(folder, voxels, *, series="1.2.3", slope=2.0, intercept=-1000.0, skip=(), twice=()):
    """A folder of DICOM slices of voxels int16 [X, Y, Z], 3 mm apart, pixels of 1 mm across and 2 mm down."""
    folder.mkdir(parents=True, exist_ok=True)
    order = [z for z in range(voxels.shape[2]) if z not in skip] + list(twice)
    for number, z in enumerate(order):
        write_dicom(
            folder / f"{(number * 7) % 31:03}.dcm",
            np.ascontiguousarray(voxels[:, :, z].T),
            SeriesInstanceUID=series,
            InstanceNumber=number + 1,
            ImagePositionPatient=[0, 0, 3.0 * z],
            ImageOrientationPatient=[1, 0, 0, 0, 1, 0],
            PixelSpacing=[2.0, 1.0],
            SliceThickness=3.0,
            RescaleSlope=slope,
            RescaleIntercept=intercept,
        )
    return folder
