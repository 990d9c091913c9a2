"""What a site keeps for an audit: the right releases, byte for byte, whatever interrupts the run, and at no cost."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from polyclinic.data.parts import open_site, prepare
from polyclinic.federation.call import Call
from polyclinic.federation.ledger.archive import ParcelArchive, is_worth_keeping, releases
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.run import run

KEEP = {"audit.keep_parcels": 1, "sites.count": 2}


def kept(folder: Path, site: str = "site-1") -> list:
    """Releases of training; those of scores are kept as well."""
    return [one for one in releases(folder / "sites" / site / "kept") if one.operation != "evaluate"]


def files(folder: Path) -> dict[str, str]:
    found = [path for path in sorted((folder / "sites").glob("*/kept/**/*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def lines(folder: Path, site: str = "site-1") -> list[dict]:
    return [json.loads(line) for line in (folder / "ledger" / f"{site}.jsonl").read_text().splitlines()]


def test_first_last_and_random_ones_are_kept_as_they_left(tiny, undisturbed):
    result = undisturbed(tiny("fedavg", KEEP, rounds=6))
    found = kept(result.folder)
    rounds = [release.round for release in found]
    assert (rounds[0], rounds[-1]) == (1, 6)
    assert len(rounds) == 3
    assert 1 < rounds[1] < 6  # the lot falls on none of the two that are kept anyway
    left = {(line["round"], line["kind"], line["digest"]) for line in lines(result.folder)}
    for release in found:
        assert {(release.round, "weights", digest) for digest in release.digests} <= left


def test_nothing_is_kept_unless_the_study_says_so_and_keeping_changes_nothing(tiny, undisturbed):
    plain = undisturbed(tiny("fedavg", {"sites.count": 2}, rounds=6))
    keeping = undisturbed(tiny("fedavg", KEEP, rounds=6))
    assert not files(plain.folder)
    assert keeping["weights_sha256"] == plain["weights_sha256"]
    assert keeping["communication"] == plain["communication"]
    assert lines(keeping.folder) == lines(plain.folder)


def test_what_leaves_together_is_kept_together(tiny, undisturbed):
    result = undisturbed(tiny("splitnn", KEEP, rounds=2))
    found = kept(result.folder)
    assert Counter(release.operation for release in found).keys() == {"forward", "finish"}
    forward = [release for release in found if release.operation == "forward"]
    assert [parcel.kind for parcel in forward[0].parcels] == ["activations", "labels"]
    assert (forward[0].round, forward[0].note["step"]) == (1, 0)
    assert forward[-1].round == 2
    assert forward[-1].note["step"] > 0
    for release in forward:  # the encoder came at the beginning of the turn
        assert release.received("weights")


def test_received_weights_and_used_images_explain_the_update(tiny, undisturbed):
    study = tiny("fedavg", {**KEEP, "optimizer.momentum": 0.0}, rounds=1, local_steps=1)
    result = undisturbed(study)
    (release,) = kept(result.folder)
    assembly = Assembly(study, prepare(study.data, study.sites), result.folder)
    part = open_site(assembly.prepared.folder, "site-1").train
    trainer = assembly.trainer()
    model = trainer.load(release.received("weights")).train()
    (index,) = release.used
    images, targets = trainer.batch(part, index, torch.Generator())
    trainer.loss(trainer.forward(images), targets).backward()
    for name, parameter in model.named_parameters():
        stepped = parameter.detach() - study.optimizer.lr * parameter.grad
        torch.testing.assert_close(stepped, release.parcel("weights").tensors[name])


class Interrupting(Display):
    def __init__(self, at: int) -> None:
        self.at = at

    def asking(self, operation, sites) -> None:
        self.at -= 1
        if self.at < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["fedavg", "splitnn"])
@pytest.mark.parametrize("at", [3, 6])
def test_an_interrupted_run_keeps_the_same(tiny, undisturbed, tmp_path, method, at):
    study = tiny(method, KEEP, rounds=4)
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path / "run", display=Interrupting(at))
    run(None, tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == files(undisturbed(study).folder)


PLAIN = Parcel("weights", {"w": torch.arange(3.0)})


@pytest.fixture
def site(tmp_path):
    return SimpleNamespace(name="b", folder=tmp_path, memory={}, state={"kept": torch.ones(2)})


def released(archive, site, round=1, value=1.0, name="train", others=(), used=(), **more):
    call = Call(site.name, name, round, arguments=more.pop("arguments", {}))
    parcels = [Parcel("weights", {"w": torch.tensor([value, round])}), *others]
    archive.released(site, call, parcels, used, "address", **more)
    return parcels


def steps_kept(site):
    return [(one.operation, one.round, one.step) for one in releases(site.folder / "kept")]


def test_a_release_lies_in_a_folder_of_its_round_step_operation_and_digest(site):
    archive = ParcelArchive(0, 7)
    archive.begins(site, Call(site.name, "train", 3, arguments={"by": ["age"]}), {"weights": PLAIN})
    images = Parcel("synthetic-images", {"x": torch.zeros(1, 1, 2, 2)})
    labels, metrics = Parcel("labels", {"y": torch.arange(2)}), Parcel("metrics", {"m": torch.ones(1)})
    batches = [torch.tensor([2, 0]), torch.tensor([1])]
    parcels = released(
        archive, site, 3, others=[metrics, labels, images], used=batches, arguments={"split": "test"}, left=[PLAIN]
    )
    [one] = releases(site.folder / "kept")
    assert one.name == f"00003-00000-train-{parcels[0].digest[:12]}"
    assert one.kinds == ["weights", "labels", "synthetic-images"]  # a few means tell nobody
    assert one.digests == [parcels[0].digest, labels.digest, images.digest]
    assert (one.split, one.left, one.round, one.step) == ("test", [["weights", PLAIN.digest]], 3, 0)
    assert one.parcel("labels").digest == labels.digest
    assert one.parcel("codes") is None
    assert [index.tolist() for index in one.used] == [[2, 0], [1]]
    assert one.received("weights")["w"].tolist() == [0.0, 1.0, 2.0]
    assert one.received("others") == {}
    assert one.turn == [("train", {"by": ["age"]}, ["weights"])]
    assert one.state["kept"].tolist() == [1.0, 1.0]


def test_steps_and_lots(site):
    archive = ParcelArchive(9, 7)
    for round, name in ((1, "train"), (1, "train"), (1, "other"), (1, "train"), (2, "train"), (2, "train")):
        released(archive, site, round, name=name)
    steps = [("train", 1, 0), ("train", 1, 1), ("train", 1, 2), ("train", 2, 0), ("train", 2, 1), ("other", 1, 0)]
    assert sorted(steps_kept(site)) == sorted(steps)
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
    came: dict[str, Parcel] = {"weights": PLAIN}
    for round, (received, left_open) in enumerate([(came, True), ({}, True), (came, False), ({}, False)]):
        archive.begins(site, Call(site.name, "train", round), received)
        site.memory = {"open": True} if left_open else {}
        released(archive, site, round)
    kept = releases(site.folder / "kept")
    assert [bool(one.received("weights")) for one in kept] == [True, True, True, False]
    assert [len(one.turn) for one in kept] == [1, 2, 0, 1]  # of weights that came twice the first are not kept


@pytest.mark.parametrize(("kind", "tensor", "worth"), [
    *(("metrics", torch.zeros(2, dtype=torch.int64), True), ("metrics", torch.zeros(1, dtype=torch.int64), False)),
    *(
        ("metrics", torch.zeros(9), False),
        ("statistics", torch.zeros(1, 1), True),
        ("weights", torch.zeros(1), True),
    ),
    *(("metrics", torch.zeros(9, dtype=torch.int32), False), ("labels", torch.zeros(2, 2), False)),
])  # fmt: skip
def test_sums_that_are_worth_keeping(kind, tensor, worth):
    assert is_worth_keeping(Parcel(kind, {"t": tensor})) is worth
