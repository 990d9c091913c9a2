"""Named data sets, each on a miniature copy of its real folder layout, with the papers' preparation."""

import gzip
import struct

import numpy as np
import pytest
from dataset_files import load, save
from medical_files import write_nifti
from scipy.io import savemat

from polyclinic.data.dataset import split
from polyclinic.data.datasets import SOURCES
from polyclinic.data.pixels import _inner_disc, graham, scale_radius
from polyclinic.data.source import FileSource
from polyclinic.errors import BadInput

pytestmark = pytest.mark.usefixtures("own_cache")


def grey(value):
    return np.full((20, 20), value)


def eye(radius=40, colour=(200, 90, 30), around=10) -> np.ndarray:
    """A photograph of an eye: a disc of one colour on black."""
    side = 2 * (radius + around)
    at = np.arange(side) - side / 2 + 0.5
    pixels = np.zeros((side, side, 3), np.uint8)
    pixels[at[:, None] ** 2 + at[None, :] ** 2 <= radius**2] = colour
    return pixels


@pytest.fixture
def retina(root):
    rows = {"10_left": 0, "10_right": 3, "13_left": 1, "15_left": 2, "16_left": 4, "17_left": 0, "17_right": 0}
    (root / "trainLabels.csv").write_text("image,level\n" + "".join(f"{k},{v}\n" for k, v in rows.items()))
    for name in rows:
        save(root / "train" / f"{name}.jpeg", eye())
    return root


def test_retinopathy_takes_left_eyes_without_grade_one_or_both_eyes_and_all_grades(retina):
    data = load("kaggle-retinopathy", retina, size=32)
    assert data.ids.tolist() == ["10_left.jpeg", "15_left.jpeg", "16_left.jpeg", "17_left.jpeg"]
    assert data.labels.tolist() == [0, 1, 1, 0]
    assert data.classes == ("healthy", "diseased")
    assert data.patient.tolist() == ["10", "15", "16", "17"]
    assert data.images.shape == (4, 3, 32, 32)
    data = load("kaggle-retinopathy", retina, size=32, eyes="both", grades=5)
    assert data.classes == ("0", "1", "2", "3", "4")
    assert len(data) == 7
    few = load("kaggle-retinopathy", retina, size=32, per_class=1)
    assert sorted(few.labels.tolist()) == [0, 1]
    with pytest.raises(BadInput, match=r"data\.per_class: class 0 has only 2 images, not 9"):
        load("kaggle-retinopathy", retina, size=32, per_class=9)


def test_grahams_preparation_by_hand():
    for radius in (40, 90):
        scaled = scale_radius(eye(radius))
        assert abs((scaled[scaled.shape[0] // 2].sum(axis=1) > 60).sum() / 2 - 300) <= 4
        prepared = graham(eye(radius))
        assert prepared.shape == (540, 540, 3)
        assert np.abs(prepared[200:340, 200:340].astype(int) - 128).max() <= 2
    assert (graham(eye())[0, 0] == 128).all()
    # Of a picture 400 rows high and 700 columns wide: 70 rows of grey above and below, 80 columns left away.
    column = np.broadcast_to(np.arange(700.0)[None, :, None], (400, 700, 3))
    row = np.broadcast_to(np.arange(400.0)[:, None, None], (400, 700, 3))
    across, down = _inner_disc(column), _inner_disc(row)
    assert across.shape == (540, 540, 3)
    assert across[270, 0, 0] == 80
    assert across[270, 539, 0] == 619
    assert down[70, 270, 0] == 0
    assert down[469, 270, 0] == 399
    assert (down[69, 270] == 128).all()
    assert (down[470, 270] == 128).all()
    inside = across[:, :, 0] != 128
    assert inside[270].sum() == 539  # one column has the value of grey itself
    ring = np.hypot(*(np.mgrid[:540, :540] - 269.5)) > 270
    assert (across[ring] == 128).all()
    assert (_inner_disc(np.zeros((600, 600, 3)))[~ring] == 0).all()
    dark, light = eye(100, (120, 60, 20)), eye(100, (180, 90, 30))
    for photograph in (dark, light):
        photograph[105:110, 105:110] = photograph[105:110, 105:110] * 0.5
    spots = [graham(photograph)[268:300, 268:300] for photograph in (dark, light)]
    assert all(spot.min() < 60 for spot in spots)
    with pytest.raises(ValueError, match="there is no eye"):
        graham(np.zeros((50, 50, 3), np.uint8))


def test_bone_age_takes_male_hands_and_the_official_test_set(root):
    (root / "boneage-training-dataset.csv").write_text(
        "id,boneage,male\n1,180,False\n2,12,True\n3,94,True\n4,50,True\n"
    )
    for case in (1, 2, 3, 4):
        save(root / "boneage-training-dataset" / "boneage-training-dataset" / f"{case}.png", grey(case))
    data = load("rsna-bone-age", root, size=16)
    assert data.labels.tolist() == [12, 94, 50]
    assert data.labels.dtype == np.float32
    assert (data.unit, data.label_range, data.classes) == ("months", (0, 228), ())
    assert load("rsna-bone-age", root, size=16, sex="female").labels.tolist() == [180]
    (root / "boneage-test-dataset.csv").write_text("Case ID,Sex\n9,M\n")
    assert len(load("rsna-bone-age", root, size=16)) == 3  # the answers are not there
    (root / "boneage-test-dataset.csv").write_text("Case ID,Sex,boneage\n9,M,100\n8,F,90\n")
    save(root / "boneage-test-dataset" / "9.png", grey(9))
    data = load("rsna-bone-age", root, size=16)
    assert data.split.tolist() == ["", "", "", "test"]
    assert data.images[:, 0, 0, 0].tolist() == [2, 3, 4, 9]
    assert split(data, validation=0.3, test=0.2, seed=0)["test"].tolist() == [3]


@pytest.fixture
def brains(root):
    rng = np.random.default_rng(0)
    for name, slices in {"Brats17_TCIA_105_1": (1, 2, 3), "Brats17_CBICA_AAB_1": (2,)}.items():
        flair = rng.uniform(10, 90, (24, 24, 5)).astype(np.float32)
        mask = np.zeros((24, 24, 5), np.uint8)
        for k in slices:
            mask[6:18, 6:18, k] = (1, 2, 4)[k % 3]
        mask[9:15, 9:15, slices[-1]] = 0
        (root / "HGG" / name).mkdir(parents=True)
        write_nifti(root / "HGG" / name / f"{name}_flair.nii.gz", flair, flips=(-1, -1, 1))
        write_nifti(root / "HGG" / name / f"{name}_seg.nii.gz", mask, flips=(-1, -1, 1))
    (root / "LGG" / "Brats17_TCIA_999_1").mkdir(parents=True)
    return root


def test_brats_gives_three_neighbouring_slices_and_has_settings(brains, tmp_path):
    data = load("brats2017", brains)
    assert data.images.shape == (4, 3, 224, 224)
    assert data.patient.tolist() == ["Brats17_CBICA_AAB_1"] + ["Brats17_TCIA_105_1"] * 3
    assert data.site.tolist() == ["CBICA", "TCIA", "TCIA", "TCIA"]
    # the middle channel of a slice is the lower neighbour of the next
    assert np.array_equal(data.images[1, 1], data.images[2, 0])
    assert np.array_equal(data.images[2, 1], data.images[1, 2])
    # 12 of 24 voxels are half of 256 pixels; the crop to 224 does not touch them
    assert data.masks[1].sum() == 128 * 128
    assert data.masks[1][112, 112] == 1
    assert data.masks[1][0, 0] == 0
    largest = load("brats2017", brains, slices="largest", size=56)
    assert largest.ids.tolist() == ["Brats17_CBICA_AAB_1 slice 2", "Brats17_TCIA_105_1 slice 1"]
    assert len(load("brats2017", brains, step=2, size=56)) == 3
    table = tmp_path / "institutions.csv"
    table.write_text("subject,institution\nBrats17_CBICA_AAB_1,Penn\nBrats17_TCIA_105_1,Bern\n")
    assert load("brats2017", brains, institutions=table, size=56).site.tolist() == ["Penn", "Bern", "Bern", "Bern"]
    table.write_text("subject,institution\nBrats17_CBICA_AAB_1,Penn\n")
    with pytest.raises(BadInput, match="no row for subject 'Brats17_TCIA_105_1'"):
        load("brats2017", brains, institutions=table, size=56)
    (brains / "HGG" / "Brats17_TCIA_105_1" / "Brats17_TCIA_105_1_flair.nii.gz").write_bytes(b"no")
    with pytest.raises(BadInput, match="3 of 4 images cannot be read") as caught:
        load("brats2017", brains, size=56)
    assert "Brats17_TCIA_105_1 slice 1: " in str(caught.value)


def test_montgomery_and_shenzhen_are_two_sites(root):
    for name in ("MCUCXR_0001_0", "MCUCXR_0104_1"):
        save(root / "MontgomerySet" / "CXR_png" / f"{name}.png", grey(5))
    for name in ("CHNCXR_0001_0", "CHNCXR_0327_1", "CHNCXR_0328_1"):
        save(root / "ChinaSet_AllFiles" / "CXR_png" / f"{name}.png", np.full((30, 20, 3), 9))
    data = load("montgomery-shenzhen", root, size=16)
    assert data.labels.tolist() == [0, 1, 0, 1, 1]
    assert data.site.tolist() == ["Montgomery"] * 2 + ["Shenzhen"] * 3
    assert data.classes == ("normal", "tuberculosis")
    assert data.images.shape == (5, 1, 16, 16)
    save(root / "MontgomerySet" / "CXR_png" / "MCUCXR_0002_x.png", grey(5))
    with pytest.raises(BadInput, match="should end in _0"):
        load("montgomery-shenzhen", root, size=16)


@pytest.fixture
def chests(root):
    rows = [
        "00000001_000.png,Cardiomegaly,0,1,58,M,PA",
        "00000001_001.png,Cardiomegaly|Effusion,1,1,58,M,PA",
        "00000002_000.png,No Finding,0,2,81,M,AP",
        "00000003_000.png,Hernia,0,3,81,F,PA",
        "00000004_000.png,Effusion,0,4,82,F,AP",
    ]
    header = "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position\n"
    (root / "Data_Entry_2017.csv").write_text(header + "\n".join(rows))
    for i, row in enumerate(rows):
        save(root / f"images_00{1 + i % 2}" / "images" / row.split(",")[0], grey(i))
    return root


def test_chestxray_compares_a_finding_and_keeps_the_official_split(chests):
    data = load("nih-chestxray", chests, size=16)
    assert data.ids.tolist() == ["00000001_001.png", "00000002_000.png", "00000004_000.png"]
    assert data.labels.tolist() == [1, 0, 1]
    assert data.classes == ("no finding", "effusion")
    assert data.patient.tolist() == ["1", "2", "4"]
    assert data.split is None
    assert load("nih-chestxray", chests, size=16, against="rest").labels.tolist() == [0, 1, 0, 0, 1]
    assert load("nih-chestxray", chests, size=16, view="AP").labels.tolist() == [0, 1]
    with pytest.raises(BadInput, match=r"no image has 'Flu'; there are Cardiomegaly, Effusion, Hernia"):
        load("nih-chestxray", chests, finding="Flu")
    (chests / "train_val_list.txt").write_text("00000001_000.png\n00000001_001.png\n00000002_000.png\n")
    (chests / "test_list.txt").write_text("00000003_000.png\n00000004_000.png\n")
    assert load("nih-chestxray", chests, size=16).split.tolist() == ["train", "train", "test"]


def test_isic2019_has_three_sites_and_one_question(root):
    diagnoses = ["MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC", "UNK"]
    cases = [("ISIC_1", "MEL", "BCN_0001"), ("ISIC_2_downsampled", "NV", "HAM_0007"), ("ISIC_3", "SCC", "MSK4_0001")]
    cases += [("ISIC_4", "MEL", "HAM_0007"), ("ISIC_5", "MEL", "")]
    rows = [f"{name}," + ",".join("1.0" if d == dx else "0.0" for d in diagnoses) for name, dx, _ in cases]
    (root / "ISIC_2019_Training_GroundTruth.csv").write_text("\n".join(["image," + ",".join(diagnoses), *rows]))
    rows = [f"{name},55.0,anterior torso,{lesion},female" for name, _, lesion in reversed(cases)]
    header = "image,age_approx,anatom_site_general,lesion_id,sex"
    (root / "ISIC_2019_Training_Metadata.csv").write_text("\n".join([header, *rows]))
    for name, _, _ in cases:
        save(root / "ISIC_2019_Training_Input" / f"{name}.jpg", np.full((30, 40, 3), 99))
    data = load("isic2019", root, size=16)
    assert data.site.tolist() == ["BCN", "HAM", "MSK4", "HAM"]
    assert data.labels.tolist() == [1, 0, 0, 1]
    assert data.classes == ("other", "melanoma")
    assert data.subgroup.tolist() == ["MEL", "NV", "SCC", "MEL"]
    assert data.patient.tolist() == ["BCN_0001", "HAM_0007", "MSK4_0001", "HAM_0007"]
    assert load("isic2019", root, size=16, labels="diagnosis").labels.tolist() == [0, 1, 7, 0]


def test_ham10000_has_felicias_four_lesions(root):
    rows = [
        ("HAM_1", "a", "nv"),
        ("HAM_1", "b", "nv"),
        ("HAM_2", "c", "mel"),
        ("HAM_3", "d", "bkl"),
        ("HAM_4", "e", "bcc"),
    ]
    rows += [("HAM_5", "f", "df")]
    lines = [f"{lesion},{image},{dx},histo,80.0,male,scalp,vidir_modern" for lesion, image, dx in rows]
    header = "lesion_id,image_id,dx,dx_type,age,sex,localization,dataset"
    (root / "HAM10000_metadata").write_text("\n".join([header, *lines]))
    for i, (_, image, _) in enumerate(rows):
        save(root / f"HAM10000_images_part_{1 + i % 2}" / f"{image}.jpg", np.full((30, 40, 3), 20 * i))
    data = load("ham10000", root, size=16)
    assert data.labels.tolist() == [0, 0, 1, 0, 1]
    assert data.classes == ("benign", "malignant")
    names = ["melanocytic nevi", "melanocytic nevi", "melanoma", "benign keratosis", "basal cell carcinoma"]
    assert data.subgroup.tolist() == names
    assert data.patient.tolist() == ["HAM_1", "HAM_1", "HAM_2", "HAM_3", "HAM_4"]
    assert data.images[:, 0, 0, 0].tolist() == [0, 20, 40, 60, 80]
    assert set(data.site) == {"vidir_modern"}


def file_sources():
    return sorted(name for name, kind in SOURCES.items() if issubclass(kind, FileSource))


@pytest.mark.parametrize("name", sorted(set(file_sources()) - {"csv", "npz"}))
def test_an_empty_folder_is_refused_in_one_sentence(name, root):
    with pytest.raises(BadInput) as caught:
        load(name, root)
    assert "\n" not in str(caught.value)
    assert str(root) in str(caught.value)


def test_a_table_of_another_year_is_named(tmp_path):
    from polyclinic.data.datasets.photographs import DIAGNOSES

    head = ",".join(["image", *DIAGNOSES])
    row = ",".join(["a", *["0"] * len(DIAGNOSES)])
    (tmp_path / "ISIC_2019_Training_GroundTruth.csv").write_text(f"{head}\n{row}\n")
    (tmp_path / "ISIC_2019_Training_Metadata.csv").write_text("image,lesion_id\na,OTHER_1\n")
    with pytest.raises(BadInput, match="no lesion_id begins with"):
        SOURCES["isic2019"](source="isic2019", path=tmp_path).listing()


def write_idx(file, values):
    content = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def test_mnist_from_idx_files(root):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28), np.uint8)
    write_idx(root / "train-images-idx3-ubyte.gz", pixels[:3])
    write_idx(root / "train-labels-idx1-ubyte.gz", np.array([5, 0, 4], np.uint8))
    write_idx(root / "t10k-images-idx3-ubyte", pixels[3:])
    write_idx(root / "t10k-labels.idx1-ubyte", np.array([7, 2], np.uint8))
    data = load("mnist", root)
    assert np.array_equal(data.images[:, 0], pixels)
    assert data.labels.tolist() == [5, 0, 4, 7, 2]
    assert data.split.tolist() == ["train"] * 3 + ["test"] * 2
    (root / "train-images-idx3-ubyte.gz").write_bytes(b"no")
    with pytest.raises(BadInput, match=r"train-images-idx3-ubyte\.gz: cannot be read as idx"):
        load("mnist", root)


def test_cifar10_from_the_binary_version(root):
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (12, 3073), np.uint8)
    records[:, 0] = np.arange(12) % 10
    for n in range(5):
        (root / f"data_batch_{n + 1}.bin").write_bytes(records[2 * n : 2 * n + 2].tobytes())
    (root / "test_batch.bin").write_bytes(records[10:].tobytes())
    (root / "batches.meta.txt").write_text(
        "\n".join(["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"])
    )
    data = load("cifar10", root)
    assert np.array_equal(data.images, records[:, 1:].reshape(-1, 3, 32, 32))
    assert data.labels.tolist() == [*range(10), 0, 1]
    assert data.classes[3] == "cat"
    assert data.split.tolist() == ["train"] * 10 + ["test"] * 2
    animals = load("cifar10", root, labels="animals")
    assert np.array_equal(animals.images, data.images[[3, 4, 5, 7]])
    assert (animals.labels.tolist(), animals.classes) == ([0, 1, 0, 1], ("cat or dog", "deer or horse"))
    assert animals.subgroup.tolist() == ["cat", "deer", "dog", "horse"]
    (root / "test_batch.bin").write_bytes(b"pickled")
    with pytest.raises(BadInput, match="not of the binary version"):
        load("cifar10", root)


def test_cifar100_has_fine_and_coarse_labels(root):
    records = np.random.default_rng(0).integers(0, 256, (3, 3074), np.uint8)
    records[:, 0], records[:, 1] = (19, 1, 2), (99, 10, 20)
    (root / "train.bin").write_bytes(records[:2].tobytes())
    (root / "test.bin").write_bytes(records[2:].tobytes())
    (root / "fine_label_names.txt").write_text("\n".join(f"fine{i}" for i in range(100)))
    (root / "coarse_label_names.txt").write_text("\n".join(f"coarse{i}" for i in range(20)))
    data = load("cifar100", root)
    assert data.labels.tolist() == [99, 10, 20]
    assert np.array_equal(data.images[2], records[2, 2:].reshape(3, 32, 32))
    assert load("cifar100", root, labels="coarse").labels.tolist() == [19, 1, 2]


def test_svhn_calls_zero_ten(root):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), np.uint8)
    savemat(root / "train_32x32.mat", {"X": pixels[..., :3], "y": np.array([[1], [10], [9]], np.uint8)})
    savemat(root / "test_32x32.mat", {"X": pixels[..., 3:], "y": np.array([[10]], np.uint8)})
    data = load("svhn", root)
    assert data.labels.tolist() == [1, 0, 9, 0]
    assert data.split.tolist() == ["train"] * 3 + ["test"]
    assert np.array_equal(data.images[3], pixels[..., 3].transpose(2, 0, 1))
    (root / "test_32x32.mat").write_bytes(b"no")
    with pytest.raises(BadInput, match="cannot be read as cropped digits"):
        load("svhn", root)


def test_omniglot_is_labelled_by_character_or_alphabet(root):
    for place in ("images_background/Greek/character01/0394_01", "images_background/Greek/character02/0395_20"):
        save(root / f"{place}.png", np.eye(105) * 255)
    save(root / "images_evaluation" / "Japanese_(katakana)" / "character01" / "1600_01.png", np.eye(105) * 255)
    data = load("omniglot", root)
    assert data.classes == ("Greek/character01", "Greek/character02", "Japanese_(katakana)/character01")
    assert data.images.shape == (3, 1, 28, 28)
    assert data.site.tolist() == ["Greek", "Greek", "Japanese_(katakana)"]
    assert load("omniglot", root, labels="alphabet").labels.tolist() == [0, 0, 1]
