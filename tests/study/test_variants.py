"""A change of variant (`--set method.name=cwt`) leaves out what is only for the former one, and says so."""

import warnings

import pytest

from polyclinic.errors import BadInput, Notice
from polyclinic.registry import notice_once
from polyclinic.study import load_study


@pytest.fixture(autouse=True)
def _notices():
    notice_once.cache_clear()


@pytest.fixture
def written(tiny, tmp_path):
    """Writes a tiny study into a file."""

    def write(method, settings=None, **more):
        (tmp_path / "study.toml").write_text(tiny(method, settings, **more).to_toml())
        return tmp_path / "study.toml"

    return write


def test_replay_goes_with_the_method(written):
    file = written("cwt-replay", {"replay.ratio": 2.0})
    with pytest.warns(Notice, match=r"method\.name = 'cwt': the table \[replay\] of the study is left out"):
        study = load_study(file, ["method.name=cwt"])
    assert (study.method.name, study.replay) == ("cwt", None)
    # what is asked for in the same command stays, and the other method of the same kind keeps the table
    with pytest.warns(Notice, match="'cwt': it replays, as the study has a table"):
        assert load_study(file, ["method.name=cwt", "replay.ratio=3.0"]).replay.ratio == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_study(file, ["method.name=fedavg-replay"]).replay.ratio == 2
    with pytest.warns(Notice, match="method.name = 'cwt': it replays, as the study has a table"):
        study = load_study(written("fedavg", {"replay.ratio": 2.0}), ["method.name=cwt"])
    assert study.replay.ratio == 2


def test_settings_tables_and_partitions_of_another_method(written):
    file = written("feder", {"tuning.alpha": 0.5}, buffer=7)
    with pytest.warns(Notice) as told:
        study = load_study(file, ["method.name=fedprox", "method.mu=0.3"])
    assert (study.method.name, study.method.rounds, study.method.mu, study.tuning) == ("fedprox", 3, 0.3, None)
    assert [str(one.message) for one in told] == [
        "method.name = 'fedprox': method.buffer, the table [tuning] of the study are left out, being for 'feder'"
    ]
    # a setting that is asked for in the same command is refused as ever
    with pytest.raises(BadInput, match=r"method\.buffer: no such setting"):
        load_study(file, ["method.name=fedprox", "method.buffer=8"])
    file = written("felicia", {"generator.name": "dcgan", "generator.critic_steps": 3, "generator.width": 5})
    with pytest.warns(Notice, match=r"generator\.name = 'stylegan2': generator\.critic_steps of the study is left out"):
        study = load_study(file, ["generator.name=stylegan2"])
    assert study.generator.width == 5  # both have it
    file = written("fedavg", {"sites": {"partition": "label-skew", "count": 3, "target_ks": 0.7}})
    with pytest.warns(Notice, match=r"sites\.partition = 'iid': sites\.target_ks of the study is left out"):
        assert load_study(file, ["sites.partition=iid"]).sites.count == 3


def test_settings_that_stand_at_their_default_are_left_out_without_a_word(tiny):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiny("fedprox").with_settings({"method.name": "cwt"}).method.name == "cwt"


def test_drawn_images_instead_of_real_ones_need_no_notice(tmp_path):
    (tmp_path / "study.toml").write_text(
        '[data]\nsource = "npz"\npath = "a.npz"\nsamples = 40\n[sites]\npartition = "iid"\ncount = 2\n'
        '[method]\nname = "fedavg"\n'
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_study(tmp_path / "study.toml", ["data.source=chest-phantom"]).data.samples == 40


def test_generators_change_with_the_method(written):
    file = written("fedavg")
    text = file.read_text()
    file.write_text(text[: text.index("[generator]")] + text[text.index("[evaluation]") :])
    study = load_study(file, ["method.name=cwt-replay", "generator.epochs=8"])
    assert (study.generator.name, study.generator.epochs) == ("vqvae2", 8)
    study = load_study(file, ["method.name=feder", "generator.steps=8"])
    assert (study.generator.name, study.generator.steps) == ("dcgan", 8)
    assert load_study(written("fedavg"), ["method.name=felicia"]).generator.name == "dcgan"
    chosen = written("fedavg", {"generator.name": "vqvae2", "generator.epochs": 7})
    with pytest.raises(BadInput, match=r"generator\.name: felicia trains GANs"):
        load_study(chosen, ["method.name=felicia"])
    with pytest.warns(Notice, match=r"generator\.name = 'gan': generator\.epochs of the study is left out"):
        assert load_study(chosen, ["method.name=felicia", "generator.name=gan"]).generator.name == "gan"


def test_all_tables_at_fault_are_named_at_once(written):
    file = written("fedavg")
    with pytest.raises(BadInput) as told:
        load_study(file, ["data.sze=3", "sites.parttion=iid", "method.round=2", "enigne.workers=2"])
    lines = str(told.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["enigne", "data.sze", "sites.parttion", "method.round"]
