"""Samples of features: a verdict with its power, from a run of fedsamples."""

from polyclinic.audits.audit import audit
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study

TABLES = {
    "data": {"source": "fundus-phantom", "size": 28, "samples": 200, "validation": 0.4, "test": 0.2},
    "sites": {"partition": "iid", "count": 2},
    "model": {"backbone": "efficientnet-lite0-1024", "input_size": 32},
    "method": {"name": "fedsamples", "rounds": 1, "looks": 0, "numbers": 16},
    "evaluation": {"every": 0, "select": "last", "final": "none"},
    "engine": {"workers": 1, "device": "cpu", "durable": False},
    "generator": {"name": "flow", "space": "features", "steps": 8, "width": 8, "blocks": 1, "sample_steps": 2},
    "audit": {"keep_parcels": 1},
}


def test_copies_and_members_are_looked_for_among_features(tmp_path):
    run(parse_study(TABLES), tmp_path / "run", cache=tmp_path / "cache")
    report = audit(tmp_path / "run", kinds=["synthetic-images"], budget="quick", features="pixels")
    text = str(report)
    for words in ("copied features", "leaning features", "samples are copies", "the nearest sample tells"):
        assert words in text
