"""Files that only grow: what a deployed site writes in a round does not grow with the rounds before it."""

import json
import os
import stat

import pytest

from polyclinic.errors import Damaged
from polyclinic.federation.call import Call
from polyclinic.federation.layers.call_checks import AnsweredCalls, Course, ScoredWeights, check_scores
from polyclinic.federation.ledger import ledger as ledger_module
from polyclinic.federation.ledger import notes
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger
from polyclinic.federation.ledger.notes import Notes
from polyclinic.federation.ledger.parcel import Parcel


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
