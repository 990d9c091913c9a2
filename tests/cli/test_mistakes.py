"""Mistakes that people make in their first days: each is one clear sentence with the cure, exit code 2, and no file."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyclinic.cli import run_app

STUDY = """
data = { source = "fundus-phantom", size = 28, samples = 80 }
sites = { partition = "iid", count = 2 }
optimizer = { batch_size = 8 }
method = { name = "cwt", rounds = 2 }
engine = { workers = 1 }
"""
OWN = """
data = { source = "npz", path = "good.npz", size = 28 }
sites = { partition = "iid", count = 2 }
method = { name = "fedavg" }
"""
AT = np.arange(50)


def draw_mistakes(top: Path) -> None:
    """Files with a mistake each, and a study and images without one."""
    rng = np.random.default_rng(0)
    (top / "study.toml").write_text(STUDY)
    (top / "own.toml").write_text(OWN)
    (top / "broken.toml").write_text("[data\n")
    (top / "notes.txt").write_text("hello")
    (top / "bytes.csv").write_bytes(bytes(range(256)))
    (top / "head.csv").write_text("path,label\n")
    for name in ("empty.csv", "empty.npz"):
        (top / name).write_text("")
    for name in ("empty", "scans", "pictures"):
        (top / name).mkdir()
    pixels = rng.integers(0, 255, (50, 28, 28), dtype=np.uint8)
    for number in range(20):
        Image.fromarray(pixels[number]).save(top / "scans" / f"{number}.png")
    for name in ("one.png", "pictures/one.png"):
        Image.fromarray(pixels[0]).save(top / name)
    (top / "scans" / "words.csv").write_text("path,label\n" + "".join(f"{n}.png,word{n}\n" for n in range(20)))
    grey, holes = pixels / 255, np.where(AT[:, None, None] == 3, np.nan, pixels / 255)
    archives = {
        "good": (pixels, AT % 2),
        "unequal": (pixels, AT[:40] % 2),
        "nan": (np.full_like(grey, np.nan), AT % 2),
        "hole": (holes, AT % 2),
        "bright": (pixels.astype(np.float32), AT % 2),
        "wide": (grey * 999, AT % 2),
        "signed": (pixels.astype(np.int16), AT % 2),
        "columns": (pixels, np.eye(3, dtype=int)[AT % 3]),
        "words": (pixels, np.array([f"word{n}" for n in AT])),
        "alike": (pixels, AT * 0),
        "two": (pixels[:2], AT[:2]),
        "films": (pixels.reshape(50, 1, 28, 28, 1), AT % 2),
        "objects": (np.array([{}] * 50), AT % 2),
        "none": (pixels[:0], AT[:0]),
    }
    for name, (images, labels) in archives.items():
        np.savez(top / f"{name}.npz", images=images, labels=labels)
    np.savez(top / "unlabelled.npz", images=pixels)


#: of `study new s.toml --for`
LOOKS = {
    "nowhere": "there is nothing; name the folder",
    "empty": "no image lies there; PNG",
    "scans --label nope": "--label: scans/words.csv has no 'nope'; it has path, label",
    "scans": "each of the 20 images has a label of its own, such as 'word0'",
    "scans/words.csv": "each of the 20 images has a label of its own",
    "one.png": "is one image; name the folder of all images",
    "notes.txt": "no column names images",
    "bytes.csv": "holds NUL characters",
    "empty.csv": "the table is empty; it needs a header",
    "head.csv": "no column names images",
    "empty.npz": "name a file that numpy.savez has written",
    "unequal.npz": "'labels' has 40 entries for 50 images; save a label for each image",
    "nan.npz": "image 0: it holds values that are no numbers (NaN or infinite)",
    "bright.npz": "instead of 0 to 1; divide them by 255",
    "wide.npz": "instead of 0 to 1; scale them with",
    "signed.npz": "not int16; scale them with",
    "columns.npz": "'labels' has 3 numbers for each image, several labels or one in 3 columns",
    "words.npz": "each of the 50 images has a label of its own",
    "alike.npz": "every image has the label '0'; name a --label that differs",
    "two.npz": "2 images are too few to train, validate and test at 3 sites",
    "films.npz": "no array has images [N, H, W]",
    "objects.npz": "it holds Python objects",
    "unlabelled.npz": "no array looks like labels [N] or masks",
    "good.npz --label nope": "--label: good.npz has no 'nope'",
    "good.npz --label images": "'images' of good.npz has not one entry for each image",
    "good.npz --site-column nope": "--site-column: good.npz has no 'nope'",
    "good.npz --site (": "--site: takes it out of names of files",
    "good.npz --method cwt": "leave the other flags out",
    "pictures": "1 images, and nothing says what they show; put them into a folder per class",
    "none.npz": "'images' holds no image; save the images",
}
#: of `study check own.toml --set`
CHECKS = {
    "data.path=unequal.npz": "'labels' has 40 entries for 50 images",
    "data.path=hole.npz": "image 3: it holds values that are no numbers (NaN or infinite) instead of 0 to 1; take",
    "data.path=wide.npz": "instead of 0 to 1; scale them with",
    "data.path=signed.npz": "not int16; scale them with",
    "data.path=columns.npz": "'labels' has 3 numbers for each image, and one is taken",
    "data.path=words.npz": "each of the 50 images has a label of its own",
    "data.path=alike.npz": "every image has the label '0'",
    "data.path=two.npz": "split is empty; use more patients",
    "data.path=one.png": "cannot be opened as an .npz archive",
    "data.path=nowhere.npz": "there is nothing at",
    "data.labels=nope": "there is no array 'nope'; it has images, labels",
    "data.sice=3": "data.sice: no such setting (did you mean 'size'?)",
    "data.size=8": "data.size: must be greater than or equal to 16",
    "data.test=0.9": "data.validation + data.test leave nothing to train on",
    "data.fold=7/5": "data.fold: there is no fold 7/5",
    "sites.count=1000": "site-34, site-35, site-36, site-37 and 963 more without training images; take fewer sites",
    "sites.target_ks=2": "sites.target_ks: no such setting",
    "task.name=regression": "data.label_range: missing",
    "task.name=segmentation": "'small-cnn' cannot do segmentation; choose unet",
    "method.rouns=3": "method.rouns: no such setting (did you mean 'rounds'?)",
    "method.name=fedavgg": "method.name: no such choice: 'fedavgg' (did you mean 'fedavg'?)",
    "method.name=analytic": "'analytic' fits a head on an encoder that nobody trains",
    "federation.sum=secure": "a secure sum of 2 sites would show what a single one sent; take 3 sites or more",
    "optimizer.lr=fast": "optimizer.lr: must be a valid number",
    "optimizer.lr=-1": "optimizer.lr: must be greater than 0",
    "model.cut=layer9": "model.cut: small-cnn has no cut 'layer9'; choose one of conv1, conv2",
    "model.backbone=resnet19": "model.backbone: no such choice: 'resnet19'",
    "model.weights=nowhere.pt": "name a file, 'random' or 'public'",
    "engine.name=carrier-pigeon": "engine.name: must be 'in-process'",
    "colour.x=1": "colour: no such table",
    "rounds": "--set rounds: write it as table.setting=value",
}
#: of `privacy`
PRIVACY = {
    "": "--samples",
    "--samples 100 --noise 1": "--epochs",
    "--samples 100 --epochs 1": "--noise",
    "--samples 100 --target-epsilon 1": "--target-epsilon",
    "--samples 100 --noise 0 --epochs 1": "no privacy",
    "--samples 100 --noise 1 --epochs 0": "--epochs",
    "--samples 0 --noise 1 --epochs 1": "samples",
    "--samples 100 --noise 1 --epochs 1 --delta 2": "delta",
    "--samples 100 --noise 1 --epochs 1 --accountant gdp": "choose one of rdp, prv",
    "--samples 100 --epochs 1 --target-epsilon -1": "--target-epsilon",
    "--curve picture.txt": ".png",
    "--curve /no/such/folder/picture.png --epochs 2": "--curve",
    "--curve picture.png --sizes many": "--sizes",
    "--curve picture.png --sizes 0,5": "--sizes",
    "--samples many": "samples",
}
COMMANDS = {
    "fly": "fly",
    "run none.toml": "none.toml: no such file; `polyclinic study new none.toml` writes one",
    "run good.npz": "good.npz: is no text, and a study is a TOML file",
    "run --nope": "--nope",
    "run --resume --out none": "holds no run to resume",
    "run .": "is a folder, and a study is a TOML file; to go on with this run: polyclinic run --resume",
    "run scans": "of your own images: polyclinic study new study.toml --for scans",
    "run study.toml --out /proc/x": "--out /proc/x: /proc cannot be written",
    "run study.toml --out good.npz": "--out good.npz: is a file; name a folder",
    "run study.toml --set sites.partition=label-skew --set sites.target_ks=1.0": "target_ks",
    "run study.toml --set task.name=segmentation": "'fundus-phantom' has no labels for segmentation",
    "run study.toml --set engine.device=quantum": "engine.device: torch knows no device 'quantum'",
    "start nowhere": "there is nothing; name the folder",
    "start one.png": "is one image; name the folder of all images",
    "start good.npz --out /proc/x": "/proc cannot be written",
    "study check broken.toml": "broken.toml: is not valid TOML",
    "study check empty": "empty: cannot be read (Is a directory), and a study is a TOML file",
    "study new study.toml": "study.toml: exists already",
    "study new study.toml --for good.npz": "study.toml: exists already; name another file, or write it anew",
    "study new study.toml/x.toml --for good.npz": "is a file, not a folder",
    "study new no/x.toml --for good.npz": "make it first",
    "study new /proc/x --for good.npz": "/proc cannot be written",
    "study new - --for good.npz": "it must be a file",
    "study new s.toml --preset nope": "--preset: no such choice: 'nope'",
    "study new s.toml --label x": "--label: goes with --for",
    "data inspect none.toml": "none.toml: no such file",
    "data inspect study.toml --out /proc/x.png": "/proc cannot be written",
    "data show brats": "did you mean 'brats2017'?",
    "compare study.toml": "--methods",
    "compare study.toml --methods fedavg,cwtt": "did you mean 'cwt'",
    "compare study.toml --methods cwt --out /proc/x": "/proc cannot be written",
    "compare study.toml --methods cwt --set method.mu=1": "none of the methods compared",
    "compare study.toml --methods cwt --folds 1": "--folds",
    "compare study.toml --methods cwt --baseline moon --out all": "--baseline moon",
    "compare study.toml --methods cwt --over optimizer.lr": "table.setting=value,value",
    "compare study.toml --methods cwt --over optimizer.lr=1,1": "each value only once",
    "tune study.toml": "--over",
    "tune study.toml --over nope=1,2": "nope: no such table",
    "tune study.toml --over optimizer.lr=a,b": "optimizer.lr: must be a valid number",
    "ledger none": "holds no ledger",
    "ledger study.toml": "study.toml: is no ledger; name a run folder",
    "report none": "there is no such folder",
    "report study.toml": "study.toml: is a file; name that of a run",
    "audit scans": "is not a run folder",
    "dossier": "dossier: `polyclinic report RUN --dossier` writes one",
    "explain": "`polyclinic ledger show RUN --for-officer` explains what left",
    "evaluate none --study none --out /proc/x": "--out /proc/x: /proc cannot be written",
    "predict none none --out study.toml/x": "study.toml is a file, not a folder",
    "bench --out study.toml/x": "study.toml is a file, not a folder",
    "forgetting none": "is not a run folder",
    "new-plugin /proc/x": "/proc cannot be written",
    "list nope": "KIND: no such choice: 'nope'; choose one of methods",
    "list method": "did you mean 'methods'?",
    "run --out study.toml/x": "study.toml is a file, not a folder; name another place",
    "run study.toml --resume --out study.toml/x": "study.toml is a file, not a folder; name another place",
    "compare --methods fedavg --out study.toml/x": "study.toml is a file, not a folder; name another place",
    "tune --over optimizer.lr=0.1 --budget 1 --out study.toml/x": "is a file, not a folder; name another place",
    "report . --out study.toml/x": "study.toml is a file, not a folder; name another place",
    "report . --dossier --out study.toml/x": "study.toml is a file, not a folder; name another place",
    "audit study --budget huge": "--budget: no such choice: 'huge'",
}
MISTAKES = [
    *[(f"study new s.toml --for {flags}", words) for flags, words in LOOKS.items()],
    *[(f"study check own.toml --set {one}", words) for one, words in CHECKS.items()],
    *[(f"privacy {flags}", words) for flags, words in PRIVACY.items()],
    *COMMANDS.items(),
]


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory) -> Path:
    draw_mistakes(folder := tmp_path_factory.mktemp("mistakes"))
    return folder


@pytest.mark.parametrize(("command", "words"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_is_one_clear_sentence_and_leaves_nothing(mistakes, monkeypatch, capsys, command, words):
    monkeypatch.chdir(mistakes)
    before = sorted(mistakes.rglob("*"))
    assert run_app(command.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert "Traceback" not in said.err
    assert said.err.count("\n") == 1 + said.err.count("\n  ")  # a list of files has a line for each
    assert sorted(mistakes.rglob("*")) == before
