"""The live file: who works, for as long as a run lasts."""

import pytest

from polyclinic.runner.run import recorder as live
from polyclinic.runner.run.recorder import FILE, Display, LiveFile
from polyclinic.runner.run.run import run


class Watching(Display):
    """Reads the file whenever the run says something."""

    def __init__(self, folder):
        self.folder, self.seen, self.heard = folder, [], []

    def asking(self, operation, sites):
        self.heard.append(("asking", operation))

    def round_done(self, line, rounds):
        self.heard.append(("round", line["round"]))

    def finished(self, result):
        self.heard.append(("finished", (self.folder / FILE).exists()))


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(live, "PAUSE", -1.0)


def test_the_file_says_who_works_and_is_gone_at_the_end(tiny, tmp_path, always, monkeypatch):
    folder, seen = tmp_path / "run", []
    write = LiveFile._write
    monkeypatch.setattr(LiveFile, "_write", lambda live, **news: (write(live, **news), seen.append(dict(live._known))))
    shown = Watching(folder)
    run(tiny("fedavg", {"sites.count": 2}, rounds=2), folder, display=LiveFile(folder, shown))
    assert seen[0]["sites"] == ["site-1", "site-2"]
    assert (seen[0]["round"], seen[0]["rounds"], seen[0]["metric"]) == (1, 2, "accuracy")
    assert {"operation": "train", "at_work": ["site-1", "site-2"], "round": 2}.items() <= {
        key: one[key] for one in seen if one["operation"] == "train" for key in ("operation", "at_work", "round")
    }.items()
    assert [what for what, _ in shown.heard].count("round") == 2
    assert shown.heard[-1] == ("finished", False)
    assert not (folder / FILE).exists()


def test_it_is_written_now_and_then_only(tmp_path):
    shown = LiveFile(tmp_path, Display())
    shown._write(round=1)
    before = (tmp_path / FILE).read_text()
    for _ in range(50):
        shown.asking("train", ["site-1"])
    assert (tmp_path / FILE).read_text() == before


def test_a_run_in_the_way_keeps_its_file(tmp_path):
    (tmp_path / FILE).write_text("another run's")
    LiveFile(tmp_path, Display()).remove()
    assert (tmp_path / FILE).read_text() == "another run's"
