"""What a site keeps for an audit: the right releases, byte for byte, whatever interrupts the run, and at no cost."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyclinic.data.parts import open_site, prepare
from polyclinic.federation.ledger.archive import ParcelArchive, releases
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


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, 99)), min_size=1, unique=True))
def test_the_choice_does_not_depend_on_the_order_of_arrival(found):
    """However often releases come again, what is left is the first, the last and the lots of the rest."""
    notes = [(str(n), {"round": r, "step": s, "priority": p}) for n, (r, s, p) in enumerate(sorted(found))]
    keeping = ParcelArchive(2, 0)
    at_once = keeping._chosen(notes)
    left: list = []
    for one in notes:
        left = [other for other in [*left, one] if other[0] in keeping._chosen([*left, one])]
    assert {name for name, _ in left} == at_once
    assert {notes[0][0], notes[-1][0]} <= at_once
    assert len(at_once) == min(4, len(notes))
