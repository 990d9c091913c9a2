"""The archive of parcels, notes written ahead, and digests by threads."""

import hashlib
import json
import os
import stat
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import Damaged, WorkFailed
from polyclinic.federation.call import Call
from polyclinic.federation.layers import gate
from polyclinic.federation.layers.call_checks import AnsweredCalls, Course, ScoredWeights, check_scores
from polyclinic.federation.ledger import digest_threads, notes, parcel
from polyclinic.federation.ledger import ledger as ledger_module
from polyclinic.federation.ledger import parcel as parcels
from polyclinic.federation.ledger.archive import ParcelArchive, is_worth_keeping, releases
from polyclinic.federation.ledger.digest_threads import Background
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger, verify
from polyclinic.federation.ledger.notes import Notes
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


def test_released_parcels_are_kept_as_they_left_and_together(tiny, undisturbed):
    result = undisturbed(tiny("fedavg", KEEP, rounds=6))
    found = kept(result.folder)
    rounds = [release.round for release in found]
    assert (rounds[0], rounds[-1]) == (1, 6)
    assert len(rounds) == 3
    assert 1 < rounds[1] < 6  # the lot falls on none of the two that are kept anyway
    left = {(line["round"], line["kind"], line["digest"]) for line in lines(result.folder)}
    for release in found:
        assert {(release.round, "weights", digest) for digest in release.digests} <= left
    plain = undisturbed(tiny("fedavg", {"sites.count": 2}, rounds=6))
    keeping = undisturbed(tiny("fedavg", KEEP, rounds=6))
    assert not files(plain.folder)
    assert keeping["weights_sha256"] == plain["weights_sha256"]
    assert keeping["communication"] == plain["communication"]
    assert lines(keeping.folder) == lines(plain.folder)
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


@pytest.fixture
def traffic(monkeypatch):
    """Bytes that pass to and from the files of a site."""
    moved = [0]

    def counting(place, name, size):
        inner = getattr(place, name)

        def wrapper(*given, **more):
            found = inner(*given, **more)
            moved[0] += size(given, found)
            return found

        monkeypatch.setattr(place, name, wrapper)

    for module in (notes, ledger_module):
        counting(module, "append", lambda given, _: len(given[1]))
        counting(module, "atomic_write", lambda given, _: len(given[1]))
    counting(notes.Path, "read_bytes", lambda _, found: len(found))
    return moved


def rounds_at_a_site(folder, first, last, traffic):
    """Bytes of each round: it begins, is trained, answered, and scored; a box comes and a step of a sum is noted."""
    ledger = Ledger(folder / "north.jsonl", None, AnchorFile(folder / "anchor.json"))
    bytes_of, course = [], Course(10_000)
    for number in range(first, last + 1):
        before = traffic[0]
        answered, scored = AnsweredCalls.at(folder / "answered.json"), ScoredWeights.at(folder / "scored.json")
        call = Call("north", "train", number, {"weights": Parcel("weights", {})})
        scored.check(call)
        scored.check_left_out(call, course)
        scored.begin(call)
        assert not answered.ended_before(number)
        assert answered.times(call) == ledger.times(number, "train") == 0
        ledger.append(round=number, operation="train", kind="weights", bytes=1, digest="d" * 64, to="coordinator")
        ledger.commit()
        answered.note(call, f"{number:064x}")
        check_scores(Call("north", "evaluate", number), [Parcel("metrics", {})], ledger, course)
        ledger.append(round=number, operation="evaluate", kind="metrics", bytes=1, digest="e" * 64, to="coordinator")
        scored.note(call)
        Notes.at(folder / "boxes.txt").first(f"{number:064x}", "a" * 64)
        Notes.at(folder / "sums.json").first(f"{number} train", "s" * 64)
        bytes_of.append(traffic[0] - before)
    return bytes_of


@pytest.mark.parametrize("rounds", [200, 2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_bytes_of_a_round_do_not_grow(tmp_path, traffic, rounds):
    found = rounds_at_a_site(tmp_path, 1, rounds, traffic)
    assert max(found[-50:]) <= max(found[5:55]) + 60  # numbers of rounds have more digits
    assert max(found) < 4_000


def test_a_process_that_begins_anew_reads_each_file_once(tmp_path, traffic):
    rounds_at_a_site(tmp_path, 1, 100, traffic)
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    notes.Notes.at.cache_clear()
    before = traffic[0]
    found = rounds_at_a_site(tmp_path, 101, 103, traffic)
    assert traffic[0] - before < 2.2 * size + 4_000 * 3  # the ledger twice: its end, and its chain
    assert max(found[1:]) < 4_000


@pytest.mark.parametrize(
    ("lines", "torn"), [(['{"a": ["1"]}', '{"a": ["2"]}'], '{"a": ["3'), (['{"a": "1"}', '{"b": "2"}'], '{"c"')]
)
def test_half_a_line_does_not_count_and_other_damage_is_told(tmp_path, lines, torn):
    path = tmp_path / "file"
    whole = "".join(f"{line}\n" for line in lines)
    path.write_text(whole + torn)
    assert Notes(path).first("a", "9") == "1"
    assert path.read_text() == whole
    for damage in ("", torn, f"{torn}\n{whole}", "[]\n", "\n"):
        path.write_text(damage)
        with pytest.raises(Damaged, match="is damaged; bring it back from a copy"):
            Notes(path).refresh()


def test_notes_are_private_shared_and_read_as_an_older_version_wrote_them(tmp_path):
    first, second = Notes(tmp_path / "notes.json"), Notes(tmp_path / "notes.json")
    first.add("a", "1")
    second.add("a", "2")
    first.add("a", "2")
    assert first.read() == second.read() == {"a": ["1", "2"]}
    assert os.name == "nt" or stat.S_IMODE(first.path.stat().st_mode) == 0o600
    path = tmp_path / "answered.json"
    path.write_text(json.dumps({"1 train coordinator": ["a", "b"], "2 evaluate coordinator": ["c"]}))
    answered = AnsweredCalls(path)
    assert answered.times(Call("north", "train", 1)) == 2
    assert answered.repeated() == 1
    answered.note(Call("north", "train", 3), "d")
    whole = {"1 train coordinator": ["a", "b"], "2 evaluate coordinator": ["c"], "3 train coordinator": ["d"]}
    assert answered.read() == AnsweredCalls(path).read() == whole
    (tmp_path / "sums.json").write_text(json.dumps({"shared k": "1", "1 train": "2"}))
    assert Notes(tmp_path / "sums.json").first("1 train", "other") == "2"


@pytest.fixture
def always(monkeypatch):
    """Every parcel counts as a large one."""
    for module in (digest_threads, gate, parcel):
        monkeypatch.setattr(module, "PAYS_FROM", 0)


def test_a_large_parcel_is_digested_by_the_thread_and_a_change_meanwhile_is_found(always, monkeypatch):
    one, other = (Parcel("weights", {"a": torch.arange(5.0)}) for _ in range(2))
    assert one.digest_soon.result() == other._digest_now() == one.digest
    hold, held = threading.Event(), Background(1)
    monkeypatch.setattr(parcel, "BACKGROUND", held)
    held.submit(hold.wait, [])
    changed = Parcel("weights", {"a": torch.zeros(5)})
    digest = changed.digest_soon
    changed.tensors["a"].add_(1)
    hold.set()
    with pytest.raises(WorkFailed, match="'a' of a parcel of kind 'weights' was changed after"):
        digest.result()


def test_lines_that_wait_for_digests_are_those_of_lines_written_at_once(tmp_path):
    about = {"round": 1, "operation": "train", "kind": "weights", "bytes": 3, "to": "coordinator", "privacy": None}
    hold, held = threading.Event(), Background(1)
    now, soon = Ledger(tmp_path / "now.jsonl"), Ledger(tmp_path / "soon.jsonl")
    for number in range(3):
        now.append(digest=f"{number}", **about)
        soon.append_soon(held.submit(lambda n=number: hold.wait() and f"{n}", []), **about)
    assert soon.due
    assert not soon.path.exists()
    hold.set()
    assert soon.head == now.head
    assert not soon.due
    assert soon.path.read_bytes() == now.path.read_bytes()
    assert len(verify(soon.path)) == 3


SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.dictionaries(st.text(max_size=6), st.tuples(st.sampled_from(list(parcels.TYPES)), SHAPES), max_size=6)


def encoded_copy(parcel: Parcel) -> bytes:
    """The bytes of an equal parcel, so that this one stays without."""
    return Parcel(parcel.kind, parcel.tensors, parcel.metadata, parcel.privacy, parcel.compressed).encoded


@settings(max_examples=60, deadline=None)
@given(TENSORS, st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=2))
def test_size_and_digest_are_those_of_the_bytes(described, metadata):
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in described.items()}
    if "__metadata__" in tensors:
        return
    parcel = Parcel("weights", tensors, metadata)
    data = encoded_copy(parcel)
    assert parcel.size == len(data)
    assert parcel.digest == hashlib.sha256(data).hexdigest()
    assert "encoded" not in vars(parcel)
