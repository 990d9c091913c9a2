"""Generative replay: what it equals, what leaves a site, and that it can be interrupted."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import ForkedWorker
from run_folders import kinds_of, lines_of
from stand_ins import rebuild

from polyclinic.errors import BadInput
from polyclinic.methods import METHODS
from polyclinic.methods.shared.generative_replay import GenerativeReplay
from polyclinic.methods.shared.method import ReplayMethod
from polyclinic.randomness import torch_rng
from polyclinic.runner.run import engines
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study
from polyclinic.training.batches import ReplayedBatches

MASKS = {
    "data": {"source": "brain-phantom", "size": 28, "samples": 60},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "segmentation"},
    "model": {"backbone": "unet"},
}


class AskedOperations(Display):
    """Notes what the coordinator asks of which sites, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def asking(self, operation: str, sites) -> None:
        self.asked.append((operation, ",".join(sites)))


def test_cwt_replay_asks_in_the_order_of_algorithm_1(study_of, tmp_path: Path, cache):
    study, display, every = study_of({"name": "cwt-replay", "rounds": 2}), AskedOperations(), "site-1,site-2,site-3"
    run(study, tmp_path / "run", display=display, cache=cache)
    in_turn = [f"site-{number}" for number in (1, 2, 3)]
    assert display.asked[:-1] == [
        *(("train_generator", site) for site in in_turn),
        ("encode_images", every),
        ("take_replay", every),
        ("look_at_replay", every),
        *(("train", site) for site in [*in_turn, *in_turn]),
    ]
    assert display.asked[-1] == ("evaluate", every)


def test_a_mixed_batch_is_the_real_one_with_a_replayed_one_behind_it():
    real = [(torch.tensor([1.0, 2.0]), torch.tensor([0, 1])), (torch.tensor([3.0, 4.0]), torch.tensor([1, 1]))]
    replayed = itertools.cycle([(torch.tensor([8.0]), torch.tensor([7])), (torch.tensor([9.0]), torch.tensor([6]))])
    first, second = ReplayedBatches(replayed, 1).join(iter(real))
    assert [first[0].tolist(), first[1].tolist()] == [[1.0, 2.0, 8.0], [0, 1, 7]]
    assert [second[0].tolist(), second[1].tolist()] == [[3.0, 4.0, 9.0], [1, 1, 6]]


@pytest.mark.parametrize("plain", ["cwt", "fedavg"])
def test_replay_of_no_images_is_the_plain_method(tiny_run, plain):
    replayed = tiny_run({"name": f"{plain}-replay"}, replay={"ratio": 0.0})
    assert replayed["weights_sha256"] == tiny_run({"name": plain})["weights_sha256"]
    assert {kind for kinds in kinds_of(replayed).values() for kind in kinds} == {"weights", "metrics"}


def test_a_replay_table_makes_any_method_replay_and_stays_as_written(tiny_run, study_of):
    table = {"replay": {"probe": False}}
    by_name, by_table = tiny_run({"name": "cwt-replay"}), tiny_run({"name": "cwt"}, **table)
    split = tiny_run({"name": "splitnn"}, **table)
    assert by_name["weights_sha256"] == by_table["weights_sha256"] == split["weights_sha256"]
    assert by_name["weights_sha256"] != tiny_run({"name": "cwt"})["weights_sha256"]
    study = study_of({"name": "fedprox", "mu": 0.5}, replay={"probe": False})
    assert isinstance(study.method, GenerativeReplay)
    assert study.as_tables()["method"]["name"] == "fedprox"
    assert study.method.mu == 0.5
    again = parse_study(study.as_tables())
    assert again == study
    assert type(again.method) is type(study.method)
    assert not isinstance(study_of({"name": "fedprox"}).method, GenerativeReplay)
    tables = {"data": {"source": "fundus-phantom"}, "sites": {"partition": "iid", "count": 2}, "replay": {}}
    with pytest.raises(BadInput, match="replay: 'centralized' cannot replay"):
        parse_study({**tables, "method": {"name": "centralized"}})


QUICK = ("fedavg", "cwt", "splitnn", "ditto")  # a kind of training each


@pytest.mark.parametrize("method", [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in METHODS
    if issubclass(METHODS[name], ReplayMethod)
])  # fmt: skip
def test_whoever_says_that_it_takes_replay_trains_on_replayed_images(tiny_run, method):
    small = {"generator": {"name": "gan", "steps": 1, "width": 4, "latent": 4}, "data": {"samples": 40}}
    small["sites"] = {"partition": "iid", "count": 2}
    table = {"codes": "prior", "samples": 8, "probe": False}
    with_replay = tiny_run({"name": method, "rounds": 1}, **small, replay=table)
    without = tiny_run({"name": method, "rounds": 1}, **small, replay={**table, "ratio": 0.0})
    assert with_replay["method"] == method
    assert with_replay["weights_sha256"] != without["weights_sha256"]


def test_codes_leave_each_site_at_four_bits_or_as_samples(tiny_run):
    result = tiny_run({"name": "fedavg-replay"})
    for kinds in kinds_of(result).values():
        assert kinds.count("generator") == 1
        assert kinds.count("codes") == 2  # at its turn with the generator, and made anew with the finished one
        assert "real-images" not in kinds
    assert result["replay"].keys() == {"code_usage_top", "code_usage_bottom", "psnr"}
    result = tiny_run({"name": "cwt-replay", "rounds": 1})
    made = [line for line in lines_of(result, "site-1") if line["operation"] == "encode_images"]
    [encoded] = [line for line in made if line["kind"] == "codes"]
    codes = result["data"]["counts"]["site-1"]["train"] * (4 * 4 + 8 * 8)  # of 28 px, padded to 32: 4x4 and 8x8
    assert encoded["bytes"] - codes // 2 < 400  # the rest is the header
    table = {"name": "dcgan", "steps": 2, "width": 4}
    result = tiny_run({"name": "fedavg-replay", "rounds": 1}, replay={"codes": "prior", "samples": 16}, generator=table)
    for kinds in kinds_of(result).values():
        assert kinds.count("generator") == 1
        assert not {"codes", "labels"} & set(kinds)
    assert result["weights_sha256"] != tiny_run({"name": "fedavg", "rounds": 1})["weights_sha256"]
    with pytest.raises(BadInput, match=r"'dcgan' has no codes to replay; set replay.codes = 'prior'"):
        tiny_run({"name": "fedavg-replay"}, generator=table)
    result = tiny_run({"name": "cwt-replay", "rounds": 1}, replay={"codes": "prior", "samples": 16})
    assert {kind for kinds in kinds_of(result).values() for kind in kinds} == {"generator", "weights", "metrics"}


@pytest.mark.parametrize("settings", [{"codes": "as-trained"}, {"own": False}, {"made": "buffer"}, {"ratio": 0.5}])
def test_every_choice_changes_what_is_learned(tiny_run, settings):
    usual = tiny_run({"name": "cwt-replay", "rounds": 2})
    other = tiny_run({"name": "cwt-replay", "rounds": 2}, replay=settings)
    assert (usual["weights_sha256"] == other["weights_sha256"]) == (settings == {"made": "buffer"})


def test_segmentation_replays_masks_with_their_images(tiny_run):
    result = tiny_run({"name": "cwt-replay", "rounds": 1}, **MASKS)
    assert "masks" in kinds_of(result)["site-1"]
    with pytest.raises(BadInput, match=r"replay\.codes"):
        tiny_run({"name": "cwt-replay"}, **MASKS, replay={"codes": "prior"})


class StopAt(Display):
    """Interrupts a run when it asks for an operation for the n-th time."""

    def __init__(self, operation: str, time: int) -> None:
        self.operation, self.left = operation, time

    def asking(self, operation: str, sites) -> None:
        self.left -= operation == self.operation
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("operation", "time"), [("train_generator", 2), ("take_replay", 1), ("train", 4)])
def test_a_replay_that_was_interrupted_ends_in_the_same_weights(tiny_run, study_of, tmp_path, cache, operation, time):
    whole, study = tiny_run({"name": "cwt-replay"}), study_of({"name": "cwt-replay"})
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path / "again", display=StopAt(operation, time), cache=cache)
    resumed = run(study, tmp_path / "again", resume=True, cache=cache)
    for name in ("weights_sha256", "communication", "replay"):
        assert resumed[name] == whole[name]


def test_latents_leave_once_in_few_bits_from_the_named_site(tiny_run):
    result = tiny_run({"name": "fedreplay", "rounds": 3})
    for kinds in kinds_of(result).values():
        assert kinds.count("latents") == kinds.count("labels") == 1
    from polyclinic.models import build

    whole = build("small-cnn", channels=3, outputs=2, size=28)
    whole.load_state_dict(result.weights())  # strict: every name of the network, and no other
    sizes = []
    for precision in ("fp32", "fp16", "int8"):
        result = tiny_run({"name": "fedreplay", "rounds": 1, "latents": precision})
        sizes.append(result["communication"]["by_kind"]["latents"])
    assert sizes[0] / sizes[1] == pytest.approx(2, rel=0.05)
    assert sizes[0] / sizes[2] == pytest.approx(4, rel=0.05)
    result = tiny_run({"name": "fedreplay", "rounds": 1, "encoder_site": "site-2"})
    assert [site for site, kinds in kinds_of(result).items() if "weights" in kinds] == ["site-2"]
    with pytest.raises(BadInput, match=r"method\.encoder_site: there is no site 'nowhere'"):
        tiny_run({"name": "fedreplay", "encoder_site": "nowhere"})
    (result.folder / "result.json").unlink()
    assert run(None, result.folder, resume=True)["encoder"] == {"site": "site-2"}, "also when it is resumed"


def test_the_optimiser_of_the_encoder_keeps_its_state_from_pass_to_pass_where_the_study_says_so(tiny_run):
    """By hand: two passes of Adam at one site, with one optimiser or with two."""
    found = {}
    for keep in (True, False):
        adam = {"name": "adam", "lr": 0.01, "batch_size": 8, "augment": [], "keep_state": keep}
        method = {"name": "fedreplay", "rounds": 1, "encoder_passes": 2, "encoder_site": "site-1"}
        result = tiny_run(method, optimizer=adam)
        own = rebuild(result)
        trainer, part = own.trainer, own.sites["site-1"].train
        model = trainer.load(own.assembly.initial_weights())
        batches, optimizer = trainer.batches(part, torch_rng(0, "site-1", "batches", 0)), None
        for _ in range(2):
            if optimizer is None or not keep:
                optimizer = torch.optim.Adam(model.parameters(), 0.01)
            trainer.train(batches, trainer.steps_in(part), optimizer)
        front = trainer.split(model)[0].state_dict()
        assert all(torch.equal(front[name], result.weights()[name]) for name in front)
        found[keep] = front["conv1.weight"].clone()
    assert not torch.equal(found[True], found[False])


@pytest.mark.parametrize(("backbone", "cut"), [("small-cnn", "conv1"), ("resnet18", "relu")])
def test_the_rest_is_trained_on_the_latents_of_all_sites(tiny_run, backbone, cut):
    """By hand: the same encoder, the union of latents in the order of the sites, one pass."""
    model = {"backbone": backbone, "cut": cut}
    few = {"data": {"samples": 40}, "sites": {"partition": "iid", "count": 2}}
    result = tiny_run({"name": "fedreplay", "rounds": 1, "encoder_passes": 1}, model=model, **few)
    own = rebuild(result)
    trainer = own.trainer
    encoder = {n: t for n, t in result.weights().items() if n in trainer.split(trainer.model)[0].state_dict()}
    front, rest = trainer.split(trainer.load({**own.assembly.initial_weights(), **encoder}))
    front.eval()
    parts = [data.train for data in own.sites.values()]
    images = torch.from_numpy(np.concatenate([part.images[:] for part in parts])).float().div(255)
    labels = torch.from_numpy(np.concatenate([part.labels[:] for part in parts]))
    with torch.no_grad():
        latents = torch.cat([front(some) for some in images.split([len(part) for part in parts])])
    optimizer = torch.optim.SGD(rest.train().parameters(), lr=0.05, momentum=0.9)
    order = torch.randperm(len(latents), generator=torch_rng(0, "coordinator", "batches", 1))
    for index in order[: len(latents) // 8 * 8].split(8):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(rest(latents[index]), labels[index]).backward()
        optimizer.step()
    by_hand = rest.state_dict()
    for name in by_hand:
        torch.testing.assert_close(by_hand[name], result.weights()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_sites_are_replayed_in_one_order_however_their_codes_arrive(tiny_run, monkeypatch):
    """In memory codes keep the order of the sites, in a file that of their names."""
    monkeypatch.setattr(engines, "WorkerProcess", ForkedWorker)
    study = {"sites": {"partition": "iid", "names": ["west", "north", "east"], "count": None}}
    here = tiny_run({"name": "fedavg-replay", "rounds": 2}, **study)
    in_processes = tiny_run({"name": "fedavg-replay", "rounds": 2}, **study, engine={"workers": 2})
    assert here["weights_sha256"] == in_processes["weights_sha256"]
