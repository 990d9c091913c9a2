"""Without a package of an extra: one sentence that names the extra; pictures beside other results are left out."""

import errno
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from polyclinic.cli import run_app
from polyclinic.data.plots import _font, coloured, contact_sheet
from polyclinic.errors import BadInput, Notice
from polyclinic.extras import EXTRAS, missing_sentence, need, picture_if_possible
from polyclinic.registry import notice_once
from polyclinic.runner.compare import outcome as comparison_figure
from polyclinic.runner.run.run import assemble
from polyclinic.tasks import TASKS

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture
def hide(monkeypatch):
    """Make packages look as if they were not installed."""

    def hidden(*packages: str) -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] in packages]:
            monkeypatch.delitem(sys.modules, name)
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)

    _font.cache_clear()
    notice_once.cache_clear()
    yield hidden
    _font.cache_clear()
    notice_once.cache_clear()


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_extra_brings_its_package(extra):
    assert any(text.startswith(EXTRAS[extra][0]) for text in PROJECT["optional-dependencies"][extra])


@pytest.mark.parametrize(
    ("package", "extra", "who", "more"),
    [("matplotlib", "figures", "this command", []), ("weasyprint", "pdf", "--pdf", ["--pdf", "--no-images"])],
)
def test_a_report_without_its_package_is_one_sentence(hide, tmp_path, capsys, one_run, package, extra, who, more):
    hide(package)
    assert run_app(["report", str(one_run), "--out", str(tmp_path / "report.html"), *more]) == 2
    wanted = f"{who} needs {package}, which is not installed; run `pip install 'polyclinic[{extra}]'`"
    assert capsys.readouterr().err.strip() == wanted
    assert not (tmp_path / "report.html").exists()


@pytest.fixture(scope="module")
def one_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("extras") / "run"
    sets = ("data.samples=60", "method.rounds=1", "method.local_steps=1", "model.backbone=lenet5", "data.size=28")
    flags = [word for change in sets for word in ("--set", change)]
    assert run_app(["run", *flags, "--set", "method.name=fedavg", "--quiet", "--out", str(folder)]) == 0
    return folder


def test_a_study_of_masks_without_monai_is_refused_before_any_work(hide, tiny, tmp_path, capsys):
    masks = {"task.name": "segmentation", "data.source": "brain-phantom", "data.size": 32, "model.backbone": "unet-512"}
    study = tiny("fedavg", masks)
    hide("monai")
    with pytest.raises(BadInput, match=r"^task\.name: 'segmentation' needs monai, .*'polyclinic\[segmentation\]'`$"):
        assemble(study, tmp_path)
    (tmp_path / "study.toml").write_text(study.to_toml())
    assert run_app(["study", "check", str(tmp_path / "study.toml"), "--no-images"]) == 2
    assert "'polyclinic[segmentation]'" in capsys.readouterr().err


def test_pictures_beside_other_results_are_left_out_with_a_notice(hide, tmp_path):
    hide("matplotlib")
    with pytest.warns(Notice, match="no picture was drawn"), picture_if_possible():
        import matplotlib  # noqa: F401
    with pytest.raises(ModuleNotFoundError), picture_if_possible():
        import no_such_package  # noqa: F401


def test_a_font_that_is_gone_costs_the_picture_and_no_result(tmp_path, monkeypatch):
    font_manager = pytest.importorskip("matplotlib.font_manager")
    gone = str(tmp_path / "DejaVuSans.ttf")
    monkeypatch.setattr(font_manager.FontManager, "findfont", lambda *_, **__: gone)
    monkeypatch.setattr(font_manager.FontManager, "_find_fonts_by_props", lambda *_, **__: [gone], raising=False)
    summary = {"methods": {"fedavg": {"test_accuracy": {"mean": 0.8, "std": 0.1, "n": 2}}}}
    picture = tmp_path / "comparison.png"
    words = r"cannot open a font \(.*DejaVuSans\.ttf.*; install it again with"
    with pytest.warns(Notice, match=words), picture_if_possible():
        comparison_figure.draw({"": summary}, TASKS["classification"](), picture)
    assert list(tmp_path.iterdir()) == []  # nothing half-written
    with pytest.raises(OSError, match="No space left"), picture_if_possible():
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_contact_sheet_needs_no_matplotlib(hide, tmp_path):
    hide("matplotlib")
    codes = torch.tensor([[[0, 1], [2, 3]]])
    maps = coloured(codes, 4, 8)
    assert maps.shape == (1, 3, 8, 8)
    assert maps[0, :, 0, 0].tolist() == [68, 1, 84]
    assert maps[0, :, 7, 7].tolist() == [253, 231, 37]
    contact_sheet({"real": np.zeros((2, 1, 8, 8), np.uint8)}, tmp_path / "sheet.png", (), "words")
    assert (tmp_path / "sheet.png").stat().st_size > 500


def test_a_package_of_no_extra_has_no_sentence(hide):
    assert missing_sentence("no_such_package") is None
    with pytest.raises(BadInput, match="plot"):
        need("no_such_package", "plot()")
