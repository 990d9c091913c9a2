"""A run with hostile names, and dossiers of it."""

import json
import shutil

import pytest
from dossier_files import HOSTILE

from polyclinic.report.dossier import write_dossier


@pytest.fixture(scope="module")
def run_folder(tiny, undisturbed, tmp_path_factory):
    """A finished run with an audit in which somebody chose hostile names."""
    folder = tmp_path_factory.mktemp("runs") / "odd name; 'ü' & <b>"
    shutil.copytree(undisturbed(tiny("fedavg")).folder, folder)
    verdicts = {
        "weights": {"left": 9, "verdict": "leaks", "words": "3 of 4 images come back", "not_tried": []},
        HOSTILE: {"left": 1, "verdict": "not tested", "words": HOSTILE, "not_tried": []},
        "a/b~c": {"left": 2, "verdict": "withstood", "words": "nothing found", "not_tried": []},
    }
    audit = {"verdicts": verdicts, "threat_model": "labels known", "budget": "quick"}
    (folder / "audit.json").write_text(json.dumps(audit))
    return folder


@pytest.fixture(scope="module")
def whole(run_folder, tmp_path_factory):
    """A dossier that is not changed."""
    return write_dossier(run_folder, tmp_path_factory.mktemp("dossiers") / "whole")


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path / "copy")
    return tmp_path / "copy"
