"""What the archive of a site keeps, release by release: folders, steps, lots, and what lies beside the parcels."""

import hashlib
from types import SimpleNamespace

import pytest
import torch

from polyclinic.federation.call import Call
from polyclinic.federation.ledger.archive import ParcelArchive, is_worth_keeping, releases
from polyclinic.federation.ledger.parcel import Parcel

PLAIN = Parcel("weights", {"w": torch.arange(3.0)})


@pytest.fixture
def site(tmp_path):
    return SimpleNamespace(name="b", folder=tmp_path, memory={})


def released(archive, site, round=1, value=1.0, name="train", others=(), used=(), **more):
    call = Call(site.name, name, round, arguments=more.pop("arguments", {}))
    parcels = [Parcel("weights", {"w": torch.tensor([value, round])}), *others]
    archive.released(site, call, parcels, used, "address", **more)
    return parcels


def kept(site):
    return [(one.operation, one.round, one.step) for one in releases(site.folder / "kept")]


def test_a_release_lies_in_a_folder_of_its_round_step_operation_and_digest(site):
    archive = ParcelArchive(0, 7)
    archive.begins(site, {"weights": PLAIN})
    labels, metrics = Parcel("labels", {"y": torch.arange(2)}), Parcel("metrics", {"m": torch.ones(1)})
    batches = [torch.tensor([2, 0]), torch.tensor([1])]
    parcels = released(
        archive, site, 3, others=[metrics, labels], used=batches, arguments={"split": "test"}, left=[PLAIN]
    )
    [one] = releases(site.folder / "kept")
    assert one.name == f"00003-00000-train-{parcels[0].digest[:12]}"
    assert one.kinds == ["weights", "labels"]  # a few means tell nobody
    assert one.digests == [parcels[0].digest, labels.digest]
    assert (one.split, one.left, one.round, one.step) == ("test", [["weights", PLAIN.digest]], 3, 0)
    assert one.parcel("labels").digest == labels.digest
    assert one.parcel("codes") is None
    assert [index.tolist() for index in one.used] == [[2, 0], [1]]
    assert one.received("weights")["w"].tolist() == [0.0, 1.0, 2.0]
    assert one.received("others") == {}


def test_kinds_of_several_words_are_told_in_full(site):
    released(ParcelArchive(0, 7), site, others=[Parcel("synthetic-images", {"x": torch.zeros(1, 1, 2, 2)})])
    assert releases(site.folder / "kept")[0].kinds == ["weights", "synthetic-images"]


def test_a_release_of_which_less_is_known(site):
    released(ParcelArchive(0, 7), site)
    [one] = releases(site.folder / "kept")
    assert (one.split, one.left, one.used, one.received("weights")) == ("", [], [], {})


def test_steps_are_counted_in_each_round_and_operation(site):
    archive = ParcelArchive(9, 7)
    for round, name in ((1, "train"), (1, "train"), (1, "other"), (1, "train"), (2, "train"), (2, "train")):
        released(archive, site, round, name=name)
    steps = [("train", 1, 0), ("train", 1, 1), ("train", 1, 2), ("train", 2, 0), ("train", 2, 1), ("other", 1, 0)]
    assert sorted(kept(site)) == sorted(steps)


def test_the_first_the_last_and_no_other_are_kept_unless_a_lot_falls_on_them(site):
    archive = ParcelArchive(0, 7)
    for round in (1, 2, 3, 4):
        released(archive, site, round)
        released(archive, site, round, name="other")
    expected = [(name, round, 0) for name in ("other", "train") for round in (1, 4)]
    assert sorted(kept(site)) == expected


def test_lots_fall_on_the_smallest_numbers():
    notes = [(str(n), {"round": n, "step": 0, "priority": p}) for n, p in enumerate((0, 5, 1, 3, 0))]
    chosen = [sorted(ParcelArchive(random, 0)._chosen(notes)) for random in (0, 1, 2, 9)]
    assert chosen == [["0", "4"], ["0", "2", "4"], ["0", "2", "3", "4"], ["0", "1", "2", "3", "4"]]
    assert ParcelArchive(0, 0)._chosen(notes[:1]) == {"0"}
    steps = [(str(s), {"round": 1, "step": s, "priority": 0}) for s in (2, 0, 1)]
    assert ParcelArchive(0, 0)._chosen(steps) == {"0", "2"}


def test_a_release_that_comes_again_is_kept_once_and_as_it_was(site):
    """An interrupted run repeats it; the folder that is there stays."""
    released(ParcelArchive(1, 7), site)
    folder = releases(site.folder / "kept")[0].folder
    before = folder.stat().st_ino
    released(ParcelArchive(1, 7), site)
    assert [one.folder.stat().st_ino for one in releases(site.folder / "kept")] == [before]


def test_what_was_received_counts_until_the_turn_is_over(site):
    archive = ParcelArchive(9, 7)
    archive.begins(site, {"weights": PLAIN})
    site.memory["open"] = True
    released(archive, site, 1)
    site.memory.clear()
    released(archive, site, 2)
    released(archive, site, 3)
    assert [bool(one.received("weights")) for one in releases(site.folder / "kept")] == [True, True, False]


@pytest.mark.parametrize(
    ("kind", "tensor", "worth"),
    [
        *(("metrics", torch.zeros(2, dtype=torch.int64), True), ("metrics", torch.zeros(1, dtype=torch.int64), False)),
        *(
            ("metrics", torch.zeros(9), False),
            ("statistics", torch.zeros(1, 1), True),
            ("weights", torch.zeros(1), True),
        ),
        *(("metrics", torch.zeros(9, dtype=torch.int32), False), ("labels", torch.zeros(2, 2), False)),
    ],
)
def test_sums_that_are_worth_keeping(kind, tensor, worth):
    assert is_worth_keeping(Parcel(kind, {"t": tensor})) is worth


def test_digests_of_what_lies_there_are_those_of_the_files(site):
    released(ParcelArchive(0, 0), site)
    [one] = releases(site.folder / "kept")
    assert one.digests == [hashlib.sha256(file.read_bytes()).hexdigest() for file in one.files]
