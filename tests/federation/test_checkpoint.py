"""A checkpoint is there as a whole or not at all, and holds no file that nobody needs."""

import json

import pytest
import torch

from polyclinic.errors import Damaged
from polyclinic.federation import checkpoint as module
from polyclinic.federation.checkpoint import Checkpoint, Manifest
from polyclinic.federation.site import SitePosition
from polyclinic.files import digest_of


def tensors(value):
    return {"a": torch.full((3,), float(value)), "n": torch.tensor(value)}


def values(checkpoint, name):
    return checkpoint.tensors(checkpoint.load(), name)["a"].tolist()


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoint"


def test_everything_comes_back(folder):
    manifest = Manifest(round=4, plain={"state": {"x": [1, 2.5, None]}}, sites={"s": SitePosition(2, 9)})
    Checkpoint(folder).save(manifest, {"state.w": tensors(1), "once.x": tensors(2)})
    other = Checkpoint(folder)
    loaded = other.load()
    assert (loaded.round, loaded.plain) == (4, {"state": {"x": [1, 2.5, None]}})
    assert loaded.sites == {"s": SitePosition(2, 9)}
    assert isinstance(loaded.sites["s"], SitePosition)
    assert sorted(loaded.files) == ["once.x", "state.w"]
    assert other.tensors(loaded, "once.x")["n"].dtype == torch.int64
    assert values(other, "state.w") == [1, 1, 1]


def test_only_sets_that_changed_are_written_again(folder, monkeypatch):
    written = []
    write = module.write_tensors
    monkeypatch.setattr(
        module, "write_tensors", lambda path, t, **how: (written.append(path.name), write(path, t, **how))
    )
    checkpoint, large, weights = Checkpoint(folder), tensors(1), tensors(2)
    checkpoint.save(Manifest(round=1), {"once.large": large, "state.w": weights})
    assert len(written) == 2
    checkpoint.save(Manifest(round=2), {"once.large": large, "state.w": tensors(3)})
    assert len(written) == 3
    assert written[-1].startswith("state.w")
    assert values(Checkpoint(folder), "once.large") == [1, 1, 1]

    resumed = Checkpoint(folder)
    loaded = {name: resumed.tensors(resumed.load(), name) for name in ("once.large", "state.w")}
    resumed.save(Manifest(round=3), {**loaded, "state.w": tensors(4)})
    assert len(written) == 4


def test_two_saves_in_one_round_do_not_touch_each_others_files(folder):
    """The file that the manifest on disk names must not change before the next manifest is there."""
    checkpoint = Checkpoint(folder)
    checkpoint.save(Manifest(round=1), {"state.w": tensors(1)})
    first = set(checkpoint.load().files.values())
    checkpoint.save(Manifest(round=1), {"state.w": tensors(2)})
    assert first.isdisjoint(checkpoint.load().files.values())

    resumed = Checkpoint(folder)
    resumed.tensors(resumed.load(), "state.w")
    second = set(resumed.load().files.values())
    resumed.save(Manifest(round=1), {"state.w": tensors(3)})
    assert second.isdisjoint(resumed.load().files.values())


class Killed(BaseException):
    pass


@pytest.mark.parametrize("resume_first", [False, True])
@pytest.mark.parametrize("step", ["tensors 1", "tensors 2", "manifest written", "manifest replaced", "file removed"])
def test_a_kill_at_any_step_leaves_the_old_checkpoint_or_the_new(folder, monkeypatch, step, resume_first):
    checkpoint = Checkpoint(folder)
    for round in (0, 1):
        checkpoint.save(Manifest(round=round), {"state.w": tensors(round), "best": tensors(round)})
    if resume_first:
        checkpoint = Checkpoint(folder)
        for name in ("state.w", "best"):
            checkpoint.tensors(checkpoint.load(), name)
    with monkeypatch.context() as patch:
        _kill_at(patch, step)
        with pytest.raises(Killed):
            checkpoint.save(Manifest(round=2), {"state.w": tensors(2), "best": tensors(2)})
    survivor = Checkpoint(folder)
    expected = 2 if step in ("manifest replaced", "file removed") else 1
    assert survivor.load().round == expected
    assert values(survivor, "state.w") == values(survivor, "best") == [expected] * 3

    survivor.save(Manifest(round=3), {"state.w": tensors(3)})
    assert values(Checkpoint(folder), "state.w") == [3, 3, 3]
    named = {*survivor.load().files.values(), *module.read_manifest(survivor.previous).files.values()}
    assert {name for name in files(folder) if name.endswith(".safetensors")} == named


def _kill_at(patch, step):
    """Die half-way through one step of a save, as `kill -9` would."""
    path = type(module.Path())
    replace, write_bytes, unlink = path.replace, path.write_bytes, path.unlink
    seen = {"tensors": 0, "killed": False}

    def die():
        seen["killed"] = True
        raise Killed

    def killing_replace(self, target):
        if target.suffix == ".safetensors":
            seen["tensors"] += 1
            if step == f"tensors {seen['tensors']}":
                die()
        result = replace(self, target)
        if step == "manifest replaced" and target.name == "manifest.json":
            die()
        return result

    def killing_write_bytes(self, data):
        if step == "manifest written":
            write_bytes(self, data[: len(data) // 2])
            die()
        return write_bytes(self, data)

    def killing_unlink(self, *args, **kwargs):
        if seen["killed"]:  # who is dead cleans nothing up
            return
        unlink(self, *args, **kwargs)
        if step == "file removed":
            die()

    patch.setattr(path, "replace", killing_replace)
    patch.setattr(path, "write_bytes", killing_write_bytes)
    patch.setattr(path, "unlink", killing_unlink)


def damage(path, how):
    content = path.read_bytes()
    if how == "removed":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        place = int(how) % len(content)
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])


HOW = ["removed", "cut", "9", "40", "-1", "-3"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["manifest.json", "state.w", "best"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder, name, how):
    checkpoint = Checkpoint(folder)
    for round in (1, 2):
        checkpoint.save(Manifest(round=round), {"state.w": tensors(round), "best": tensors(round)})
    file = folder / checkpoint.load().files.get(name, name)
    damage(file, how)
    survivor = Checkpoint(folder)
    assert survivor.load().round == 1
    assert str(file) in survivor.problem
    assert survivor.tensors(survivor.load(), "state.w")["a"].tolist() == [1, 1, 1]
    survivor.save(Manifest(round=2), {"state.w": tensors(2), "best": tensors(2)})
    again = Checkpoint(folder)
    assert (again.load().round, again.problem) == (2, "")
    assert values(again, "best") == [2, 2, 2]


def test_the_one_before_stays_until_a_new_one_is_there_and_an_old_manifest_has_no_digest(folder):
    """After a damaged checkpoint the next save must not put it in the place of the whole one."""
    checkpoint = Checkpoint(folder)
    for round, version in ((5, 5), (10, 10)):
        checkpoint.save(Manifest(round=round, sites={"s": SitePosition(version, 1)}), {"state.w": tensors(round)})
    damage(folder / checkpoint.load().files["state.w"], "-1")
    resumed = Checkpoint(folder)
    assert resumed.load().round == 5
    before = resumed.save(Manifest(round=6, sites={"s": SitePosition(6, 1)}), {"state.w": tensors(6)})
    assert before.sites == {"s": SitePosition(5, 1)}
    assert module.read_manifest(resumed.previous).round == 5
    assert resumed.save(Manifest(round=7), {"state.w": tensors(7)}).round == 6


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["manifest.json", "state.w"])
def test_without_a_whole_checkpoint_the_damaged_file_is_named(folder, name, how):
    checkpoint = Checkpoint(folder)
    checkpoint.save(Manifest(round=1), {"state.w": tensors(1)})
    if (name, how) == ("manifest.json", "removed"):
        pytest.skip("that is a run that was killed before its first checkpoint")
    file = folder / checkpoint.load().files.get(name, name)
    damage(file, how)
    with pytest.raises(Damaged, match=f"{file.name}: is (damaged|missing)"):
        Checkpoint(folder).load()


def test_a_manifest_of_an_older_version_has_no_digest(folder):
    checkpoint = Checkpoint(folder)
    checkpoint.save(Manifest(round=1), {"state.w": tensors(1)})
    old = json.loads(checkpoint.path.read_text())
    del old["sha256"]
    checkpoint.path.write_text(json.dumps(old))
    assert Checkpoint(folder).load().round == 1


@pytest.mark.parametrize("change", [
    {"files": "x"},
    {"files": {"state.a": "../../elsewhere"}},
    {"files": {"state.a": 3}},
    {"round": "2"},
    {"sites": []},
])  # fmt: skip
def test_a_manifest_of_other_types_is_damaged_even_if_its_digest_fits(tmp_path, change):
    checkpoint = Checkpoint(tmp_path / "checkpoint")
    checkpoint.save(Manifest(round=2), {})
    content = json.loads(checkpoint.path.read_text()) | change
    content.pop("sha256")
    checkpoint.path.write_text(json.dumps({**content, "sha256": digest_of(content)}))
    with pytest.raises(Damaged, match=r"manifest\.json: is damaged and cannot be read"):
        checkpoint.load()


@pytest.mark.parametrize("part", ["round", "files", "plain", "sites"])
def test_a_manifest_without_a_part_gives_way_to_the_one_before(folder, part):
    checkpoint = Checkpoint(folder)
    for number in (1, 2):
        checkpoint.save(Manifest(round=number), {"state.w": tensors(number)})
    content = json.loads(checkpoint.path.read_text())
    del content[part], content["sha256"]  # without a digest, as an older version wrote it
    checkpoint.path.write_text(json.dumps(content))
    survivor = Checkpoint(folder)
    assert survivor.load().round == 1
    assert str(checkpoint.path) in survivor.problem
    checkpoint.path.write_text('{"round": 1}')
    checkpoint.previous.unlink()
    with pytest.raises(Damaged, match=r"manifest\.json: is damaged"):
        Checkpoint(folder).load()
