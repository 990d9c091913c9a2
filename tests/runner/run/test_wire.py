"""A run with `engine.wire`: fewer bytes, the ledger says how they travelled, and every engine ends in the same bits."""

import json
import shutil

import pytest

from polyclinic.audits.parcels import check_against_ledger
from polyclinic.errors import BadInput
from polyclinic.federation.ledger import wire as wire_codec
from polyclinic.federation.ledger.archive import releases
from polyclinic.runner.run.run import run
from polyclinic.study import Study

TABLES = {
    "data": {"source": "fundus-phantom", "samples": 48, "size": 28},
    "sites": {"partition": "iid", "count": 3},
    "model": {"backbone": "lenet5"},
    "optimizer": {"batch_size": 8, "lr": 0.05},
    "method": {"name": "fedavg", "rounds": 2},
    "audit": {},
}


def study(wire, **more):
    return Study(
        **{**TABLES, **more, "engine": {"workers": 1, "device": "cpu", "wire": wire, **more.get("engine", {})}}
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("wire")
    return {wire: run(study(wire), place / wire, cache=place / "cache") for wire in ("exact", "fp16", "int8", "delta")}


def result(run):
    return json.loads((run.folder / "result.json").read_text())


def lines(run):
    return [json.loads(line) for line in (run.folder / "ledger" / "site-1.jsonl").read_text().splitlines()]


def test_fewer_bytes_travel_and_a_difference_changes_no_result(runs):
    bytes_of = {wire: result(one)["communication"]["total_bytes"] for wire, one in runs.items()}
    assert bytes_of["exact"] > bytes_of["delta"] > bytes_of["fp16"] > bytes_of["int8"]
    weights = {wire: result(one)["weights_sha256"] for wire, one in runs.items()}
    assert weights["delta"] == weights["exact"]
    assert len({weights["exact"], weights["fp16"], weights["int8"]}) == 3


def test_the_ledger_says_how_it_travelled(runs):
    assert all("wire" not in line for line in lines(runs["exact"]))
    for wire in ("fp16", "int8", "delta"):
        sent = [line for line in lines(runs[wire]) if line["kind"] == "weights"]
        assert sent
        assert {line["wire"] for line in sent} == {wire}
        assert all("wire" not in line for line in lines(runs[wire]) if line["kind"] == "metrics")


@pytest.mark.parametrize("wire", ["exact", "fp16", "int8", "delta"])
def test_what_is_kept_for_an_audit_is_what_the_ledger_says_left(runs, wire):
    kept = releases(runs[wire].folder / "sites" / "site-1" / "kept")
    assert kept
    for release in kept:
        check_against_ledger("site-1", release, lines(runs[wire]))


def test_another_build_of_zlib_resumes_a_run(runs, tmp_path, monkeypatch):
    """The second round is done again with other compressed bytes of the same numbers."""
    folder = tmp_path / "run"
    shutil.copytree(runs["int8"].folder, folder)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "checkpoint")
    for state in (folder / "sites").iterdir():
        shutil.rmtree(state)
    monkeypatch.setattr(wire_codec, "LEVEL", 9)
    again = run(None, folder, resume=True, cache=runs["int8"].folder.parent / "cache")
    assert result(again)["weights_sha256"] == result(runs["int8"])["weights_sha256"]
    assert [line["digest"] for line in lines(again)] == [line["digest"] for line in lines(runs["int8"])]


@pytest.mark.parametrize("wire", ["int8", "delta"])
@pytest.mark.slow
def test_worker_processes_end_in_the_same_bits(runs, wire, tmp_path):
    cache = runs[wire].folder.parent / "cache"
    other = run(study(wire, engine={"workers": 2}), tmp_path / "run", cache=cache)
    assert result(other)["weights_sha256"] == result(runs[wire])["weights_sha256"]
    assert lines(other) == lines(runs[wire])


@pytest.mark.parametrize("kind", ["integer", "secure"])
def test_sums_of_whole_numbers_want_exact_numbers(kind):
    with pytest.raises(BadInput, match=r"engine\.wire.*set engine\.wire = 'exact'"):
        study("int8", federation={"sum": kind})
