"""`kill -9` anywhere, once or twice, then resume: the same weights, ledgers, history and bytes as without."""

import random
import shutil
import time

import pytest
from processes import begin, kill, start, wait_for
from run_folders import assert_same_run

from polyclinic.federation.ledger.ledger import verify
from polyclinic.runner.run.run import run

KEEP = {"optimizer.keep_state": True}
STUDIES = {
    "parallel": ("fedavgm", {}),
    "serial": ("cwt", KEEP),
    "split": ("splitnn", KEEP),
    "personal": ("fedbn", {"model.backbone": "small-cnn", "evaluation.select": "best"}),
}
MORE = {
    "rare checkpoints": ("fedavg", {"engine.checkpoint_every": 2}),
    "images shared first": ("fedavg-share", {}),
    "pooled": ("centralized", KEEP | {"optimizer.name": "adam"}),
    "gradients": ("fedsgd", KEEP),
    "alone": ("standalone", {"evaluation.select": "best"}),
    "controls": ("scaffold", KEEP),
    "own models beside": ("ditto", KEEP | {"evaluation.select": "best"}),
    "own models at the end": ("finetune", {"evaluation.select": "best"}),
    "last models": ("moon", {}),
    "adaptive": ("fedopt", {}),
}


class Killable:
    """A study that can be run in processes of its own, and what it should end in."""

    def __init__(self, study, expected, folder):
        self.study, self.expected, self.folder = study, expected, folder
        self.runs = 0
        self.changes = self._changes()

    def _changes(self):
        """What an undisturbed run changes on disk, in order."""
        folder = self.fresh()
        process = start(begin, folder)
        process.join()
        assert process.exitcode == 0
        assert_same_run(folder, self.expected)
        return (folder.parent / f"{folder.name}.changes").read_text().splitlines()

    def fresh(self):
        self.runs += 1
        folder = self.folder / f"run-{self.runs}"
        folder.mkdir(parents=True)
        (folder / "study.toml").write_text(self.study.to_toml())
        return folder

    def killed_at(self, *points, midway=False):
        """A folder whose run was killed at its so-manieth change, resumed, killed again, ..."""
        folder = self.fresh()
        for point in points:
            process = start(begin, folder, die_at=point, midway=midway)
            process.join()
            if process.exitcode == 0:  # it had less than that left to do
                return folder
            assert process.exitcode == -9
        assert not (folder / "result.json").exists()
        return folder

    def resume_and_check(self, folder):
        run(None, folder, resume=True)
        assert_same_run(folder, self.expected)
        shutil.rmtree(folder)

    @property
    def after_the_rounds(self):
        """The first change that comes after the checkpoint of the last round."""
        last = max(k for k, change in enumerate(self.changes) if change.endswith("history.jsonl"))
        return (
            last
            + 1
            + next(k for k, c in enumerate(self.changes[last:], 1) if c == "os.rename checkpoint/manifest.json")
        )


@pytest.fixture(scope="module")
def killable(tiny, undisturbed, tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            method, settings = (STUDIES | MORE)[name]
            study = tiny(method, settings, **({"rounds": 5} if name == "rare checkpoints" else {}))
            made[name] = Killable(study, undisturbed(study).folder, tmp_path_factory.mktemp("killed"))
        return made[name]

    return make


@pytest.mark.parametrize("name", STUDIES)
def test_killed_in_any_round(killable, name):
    case = killable(name)
    draw = random.Random(f"{name} rounds")
    for point in draw.sample(range(2, case.after_the_rounds), 4):
        case.resume_and_check(case.killed_at(point, midway=draw.random() < 0.5))


@pytest.mark.parametrize(
    "name", ["parallel", *(pytest.param(one, marks=pytest.mark.slow) for one in STUDIES if one != "parallel")]
)
def test_killed_in_the_final_evaluation(killable, name):
    case = killable(name)
    late = [k for k in range(case.after_the_rounds, len(case.changes)) if "ledger" in case.changes[k - 1]]
    for point in (late[0], random.Random(f"{name} late").choice(late[1:-1]), late[-1]):
        case.resume_and_check(case.killed_at(point))


@pytest.mark.parametrize("name", STUDIES)
def test_killed_while_the_result_is_written(killable, name):
    case = killable(name)
    files = ("model.safetensors", "result.json")
    for point in [k for k, change in enumerate(case.changes, 1) if change.endswith(files)]:
        case.resume_and_check(case.killed_at(point))


@pytest.mark.parametrize("what", ["study.toml.partial", "study.toml", "history.jsonl", "ledger/site-1.jsonl"])
def test_killed_while_a_resumed_run_begins(killable, what):
    """After a torn line in the middle of round 3, the next run dies while it puts its files in order."""
    case = killable("parallel")
    in_round_3 = [k for k, change in enumerate(case.changes, 1) if change.endswith("history.jsonl")][3] - 1
    first = next(k for k, change in enumerate(case.changes, 1) if change.endswith(what))
    case.resume_and_check(case.killed_at(in_round_3, first, midway=True))


@pytest.mark.parametrize("name", STUDIES)
def test_killed_twice_in_a_row(killable, name):
    case = killable(name)
    draw = random.Random(f"{name} twice")
    first = draw.randrange(10, case.after_the_rounds)
    case.resume_and_check(
        case.killed_at(first, draw.randrange(3, 12), draw.randrange(20, len(case.changes)), midway=True)
    )


#: others are killed by `lab/campaigns/faults.py`, or with `make check-all`
QUICK = ("rare checkpoints", "images shared first", "controls", "own models beside")


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in MORE])
def test_killed_somewhere(killable, name):
    case = killable(name)
    points = random.Random(f"{name} somewhere").sample(range(2, case.after_the_rounds), 2)
    case.resume_and_check(case.killed_at(*points))


def lines(folder):
    paths = (folder / "ledger").glob("*.jsonl") if (folder / "ledger").exists() else []
    return sum(path.read_bytes().count(b"\n") for path in paths)


@pytest.mark.parametrize("name", STUDIES)
def test_killed_at_a_moment_of_no_ones_choosing(killable, name):
    """By the clock, not at a change to a file: in the middle of training, or of a line."""
    case, draw = killable(name), random.Random(f"{name} clock")
    total = lines(case.expected)
    folder = case.fresh()
    process = start(begin, folder)
    target = draw.randrange(1, total)
    wait_for(lambda: lines(folder) >= target)
    time.sleep(draw.random() * 0.05)
    kill(process)
    for path in (folder / "ledger").iterdir():
        if path.read_bytes().endswith(b"\n"):
            verify(path)
    case.resume_and_check(folder)
