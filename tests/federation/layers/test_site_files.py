"""Files of a site, its defence, and poisoning."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_study import plain_study

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.errors import BadInput
from polyclinic.federation.call import Call, GateRefused
from polyclinic.federation.layers import leaving as transcript
from polyclinic.federation.layers.cohort import images_in_generator_step, patients_in
from polyclinic.federation.layers.defence_and_poisoning import Defence, Poisoning, patched
from polyclinic.federation.layers.leaving import ScoredModel, was_scored
from polyclinic.federation.layers.sealing import TAKEN, KeyExchange, asked_in_state, seal, unseal
from polyclinic.federation.ledger.keys import KitKeys, SeedKeys, seal_box
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.notes import Notes
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.operation import Transaction, operation
from polyclinic.federation.site import Site, SiteState
from polyclinic.randomness import torch_rng
from polyclinic.runner.run.run import run


class Pinned(SeedKeys):
    """The keys of some sites only, as a kit has them."""

    def public(self, site):
        return super().public(site) if site in ("a", "b") else None


def part(count=3, **more):
    images = np.arange(count * 4, dtype=np.uint8).reshape(count, 1, 2, 2)
    return ImageSet(images, np.arange(count), **more)


@pytest.fixture
def make(tmp_path):
    def build(name="b", secret="", data=None, local=()):
        trainer = SimpleNamespace(local_names=local)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        data = data or SiteData(name, part(), part(1), part(2))
        return Site(name, plain_study(), data, trainer, SiteState(), folder, secret=secret, keys=Pinned(0))

    return build


PLAIN = Parcel("weights", {"w": torch.arange(3.0)}, privacy={"epsilon": 1.0})


def sent(make, parcel=PLAIN):
    return seal(make("a"), parcel, Call("a", "hand_over", 2, to="b"))


def refusal(site, parcel, round=2) -> str:
    with pytest.raises(ParcelRejected) as refused:
        unseal(site, parcel, Call(site.name, "take", round))
    return str(refused.value)


def test_a_box_opens_once_and_tells_its_kind_and_privacy_outside(make):
    site, box = make("b"), sent(make)
    assert (box.kind, box.content, box.privacy) == (SEALED, "weights", {"epsilon": 1.0})
    assert unseal(site, box, Call("b", "take", 2)).digest == PLAIN.digest
    assert site.state[TAKEN].shape == (1, 32)
    assert refusal(site, box) == "the sealed parcel from site 'a' was taken before"
    assert unseal(site, sent(make), Call("b", "take", 2)).digest == PLAIN.digest
    assert site.state[TAKEN].shape == (2, 32)
    assert refusal(site, box) == "the sealed parcel from site 'a' was taken before"


def test_boxes_are_for_pinned_keys_and_hold_what_is_written_on_them(make):
    with pytest.raises(ParcelRejected, match=r"^site 'a' has no key of 'z', for whom the parcel is$"):
        seal(make("a"), PLAIN, Call("a", "hand_over", 2, to="z"))
    box = sent(make)
    foreign = replace(box, metadata={**box.metadata, "from": "z"})
    assert refusal(make("b"), foreign) == "a sealed parcel came from 'z', of whom site 'b' has no key"
    for tensors in ({}, {"other": box.tensors["box"]}, {**box.tensors, "more": torch.ones(1)}):
        assert "a sealed parcel came from 'a'" in refusal(make("b"), replace(box, tensors=tensors))
    about = {"from": "a", "operation": "hand_over", "kind": "latents"}
    keys = Pinned(0)
    bound = {**about, "to": "b", "round": 2}
    box = seal_box(PLAIN.encoded, bound, sender=keys.own("a"), recipient=keys.public("b"))
    false = Parcel(SEALED, {"box": torch.frombuffer(box, dtype=torch.uint8)}, about)
    assert refusal(make("b"), false) == "a parcel of kind 'weights' came under the name of 'latents'"
    for site, round in (("b", 3), ("a", 2)):  # another round than it was sealed in, another site than it is for
        assert "do not open: it was changed on its way" in refusal(make(site), sent(make), round)


def test_a_deployed_site_that_was_put_back_takes_a_box_again_for_the_same_call_only(make):
    site, box = make("b", secret="s"), sent(make)
    unseal(site, box, Call("b", "take", 2))
    again = make("b", secret="s")  # without its state
    unseal(again, box, Call("b", "take", 2))
    assert refusal(again, box) == "the sealed parcel from site 'a' was taken before"  # its state knows it
    other = make("b", secret="s")
    other.state["other"] = torch.ones(1)
    assert refusal(other, box) == "the sealed parcel from site 'a' was taken before"
    simulated = make("b")
    unseal(simulated, box, Call("b", "take", 2))  # has no such file


def test_a_call_in_a_state_has_a_digest_of_its_own(make):
    site = make("b")
    site.state["w"] = torch.arange(4)
    taking = Call("b", "take", 2, arguments={"split": "test"})

    def digest(call=None, **state):
        one = make("b")
        for name, tensor in {"w": torch.arange(4), **state}.items():
            one.state[name] = tensor
        return asked_in_state(one, call or taking)

    same = asked_in_state(site, taking)
    assert digest() == same
    assert len(bytes.fromhex(same)) == 32
    calls = [Call("b", "take", 3, arguments={"split": "test"}), Call("b", "give", 2, arguments={"split": "test"})]
    found = [same, *map(digest, [*calls, Call("b", "take", 2)]), digest(v=torch.ones(1))]
    found += [digest(w=w) for w in (torch.arange(4) + 1, torch.arange(4).reshape(2, 2), torch.arange(4.0).double())]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("key", [torch.zeros(32), torch.zeros(31, dtype=torch.uint8), torch.zeros(1, 32).byte()])
def test_a_key_is_32_bytes(make, key):
    true = {name: torch.tensor(list(Pinned(0).public(name)), dtype=torch.uint8) for name in ("a", "b")}
    assert KeyExchange().take_keys(make("b"), true).tensors.keys() == {"a", "b"}
    with pytest.raises(ParcelRejected, match="what came as the key of site 'a' is none"):
        KeyExchange().take_keys(make("b"), {**true, "a": key})
    with pytest.raises(ParcelRejected, match="the key of site 'z' is not the one that site 'b' has for it"):
        KeyExchange().take_keys(make("b"), {"z": true["a"]})


def test_a_kit_whose_own_key_is_not_listed_says_so(tmp_path):
    (tmp_path / "signing.key").write_bytes(bytes(32))
    (tmp_path / "site_keys.toml").write_text(f'[signing]\nnorth = ["{64 * "1"}"]\n')
    with pytest.raises(BadInput, match=r"signing\.key: is damaged \(its public key is not the one in site_keys\.toml"):
        KitKeys(tmp_path).owner()


def work(self, site, split="validation", own="current"):
    """An operation that scores a split of the site's images."""


def without(self, site):
    """An operation that says nothing of splits."""


def declared(*releases, **how):
    return operation(*releases, **how)(lambda self, site: None).operation


SCORES, STATISTICS = declared("metrics"), declared("statistics", splits=("test",))


def asked(site, operation_=SCORES, value=1.0, split="test", does=work, **arguments):
    given = {} if value is None else {"weights": Parcel("weights", {"w": torch.tensor([value])})}
    call = Call(site.name, "evaluate", 1, given, {"split": split, **arguments})
    transaction = Transaction(call, does, operation_)
    transaction.site = site
    return ScoredModel(transaction), call


def told(site, *given, **how):
    model, call = asked(site, *given, **how)
    model.check(call)
    model.note(call)


def test_scores_and_statistics_of_test_images_are_about_one_model(make):
    site = make()
    told(site, SCORES, 2.0, split="validation")  # no matter
    assert not was_scored(site)
    told(site, SCORES, 1.0)
    told(site, SCORES, 1.0)
    assert was_scored(site)
    told(site, STATISTICS, 1.0, does=without)
    sentence = "^'evaluate' came for another model than the one whose metrics of test images were told in this run"
    with pytest.raises(GateRefused, match=sentence):
        told(site, STATISTICS, 2.0, does=without)
    with pytest.raises(GateRefused, match="whose statistics of test images were told"):
        told(site, SCORES, 2.0)
    told(site, declared("weights"), 2.0)
    told(site, declared("weights"), 2.0, does=without)
    kept = Notes(site.folder / "tested.json").read()
    assert {kind: len(models) for kind, models in kept.items()} == {"metrics": 1, "statistics": 1}


@pytest.mark.parametrize(("local", "counts"), [((), False), (("head",), True)])
def test_the_part_of_a_model_that_is_the_sites_own_counts_where_there_is_one(make, local, counts):
    site = make(local=local)
    told(site, STATISTICS, does=without)
    told(site, SCORES, own="current")
    told(site, SCORES)  # the default of the operation
    if counts:
        with pytest.raises(GateRefused, match="another model"):
            told(site, SCORES, own="first")
    else:
        told(site, SCORES, own="first")


@pytest.mark.parametrize(("cases", "patients"), [(None, 3), ([1, 1, 2, 3], 2)])
def test_patients_in_batches(cases, patients):
    """Images 0, 1 and 3, some of them twice; what comes after the site's own four is nobody's."""
    images = part(4, cases=None if cases is None else np.array(cases))
    assert patients_in(images, [torch.tensor([0, 1]), torch.tensor([[1, 4], [9, 3]])]) == patients


def test_patients_in_the_smallest_batch():
    assert images_in_generator_step(SimpleNamespace(batch_size=8, prior_batch_size=4)) == 4
    assert images_in_generator_step(SimpleNamespace(batch_size=8, prior_batch_size=None)) == 8
    assert images_in_generator_step(SimpleNamespace()) == images_in_generator_step(None) == 0


TRAIN = Call("b", "train", 1)


def trail(make, call=TRAIN, settings="{}", received=None, data=None, times=1):
    site = make(data=data)
    assert transcript.transcript_of(site.state) == ""
    for _ in range(times):
        transcript.extend(site, settings, call, received or {})
    return transcript.transcript_of(site.state)


def test_all_that_numbers_depend_on_is_in_the_transcript(make):
    first, masks = trail(make), np.ones((3, 2, 2), np.uint8)
    assert trail(make) == first
    assert len(bytes.fromhex(first)) == 32
    calls = [Call("b", "other", 1), Call("b", "train", 2), Call("b", "train", 1, to="c")]
    found = [trail(make, call) for call in [*calls, Call("b", "train", 1, arguments={"x": 1})]]
    found += [trail(make, settings="{1}"), trail(make, received={"weights": PLAIN}), trail(make, times=2)]
    for train in (part(4), part(masks=masks), part(masks=1 - masks), part(cases=np.arange(3)), part(cases=np.ones(3))):
        found.append(trail(make, data=SiteData("b", train, part(1), part(2))))
    found.append(trail(make, data=SiteData("b", part(), part(2), part(1))))
    assert len({first, *found}) == len(found) + 1


def site(name="north"):
    images = np.zeros((8, 1, 6, 6), np.uint8)
    part = ImageSet(images, np.array([0, 0, 0, 0, 1, 1, 1, 1]))
    return SiteData(name, part, part, part)


def attack(kind, **settings):
    return Poisoning(sites=("north",), attack=kind, **settings)


def test_labels_and_images_of_attackers_alone_are_changed():
    held = attack("label-flip").data(site(), 2, seed=0)
    assert held.train.labels.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert held.test.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert attack("label-flip").data(site("south"), 2, seed=0).train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (attack("label-flip", share=0.5).data(site(), 2, seed=0).train.labels != site().train.labels).sum() == 4
    held = attack("backdoor", target=1, patch=2, share=0.5).data(site(), 2, seed=0)
    marked = held.train.images[:, 0, -1, -1] == 255
    assert marked.sum() == 4
    assert (held.train.labels[marked] == 1).all()
    assert (held.train.images[marked][:, :, :4] == 0).all()
    assert patched(site().test.images, 2).sum() == 8 * 4 * 255


@pytest.mark.parametrize(("kind", "expected"), [("scale", [31.0, 1.0]), ("sign-flip", [-29.0, 1.0])])
def test_updates_are_stretched_or_turned_round(kind, expected):
    sent = {"weights": Parcel("weights", {"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(3)})}
    parcel = Parcel("weights", {"w": torch.tensor([4.0, 1.0]), "n": torch.tensor(4)}, {"samples": 5})
    found = attack(kind).update("north", parcel, sent, 0, 1)
    assert found.tensors["w"].tolist() == expected
    assert found.tensors["n"] == 4
    assert found.metadata == {"samples": 5}
    assert attack(kind).update("south", parcel, sent, 0, 1) is parcel


def test_noise_is_drawn_for_updates_and_what_is_none_stays():
    """Each tensor by itself, in turn from one generator; 3 and 4 have a root mean square of the root of 12.5."""
    sent = Parcel("weights", {"a": torch.tensor([1.0, 2.0]), "n": torch.tensor(1), "b": torch.tensor([0.0])})
    parcel = Parcel("weights", {"a": torch.tensor([4.0, 6.0]), "n": torch.tensor(2), "b": torch.tensor([-5.0])})
    drawn = torch_rng(7, "north", "poisoning", 3)
    first, second = torch.randn(2, generator=drawn), torch.randn(1, generator=drawn)
    found = attack("noise", factor=2.0).update("north", parcel, {"weights": sent}, 7, 3).tensors
    torch.testing.assert_close(found["a"], parcel.tensors["a"] + 2 * 12.5**0.5 * first)
    torch.testing.assert_close(found["b"], parcel.tensors["b"] + 2 * 5 * second)
    assert found["n"] == 2
    # weights of which nothing came, tensors that were not sent, and other kinds
    weights = Parcel("weights", {"w": torch.ones(2), "own": torch.ones(1)})
    assert attack("scale").update("north", weights, {}, 0, 1) is weights
    came = {"weights": Parcel("weights", {"w": torch.zeros(2)})}
    assert attack("scale").update("north", weights, came, 0, 1).tensors["own"].tolist() == [1.0]
    metrics = Parcel("metrics", {"m": torch.ones(2)})
    assert attack("scale").update("north", metrics, came, 0, 1) is metrics
    for kind in ("label-flip", "backdoor"):
        assert attack(kind).update("north", weights, came, 0, 1) is weights
    gradients = Parcel("gradients", {"g": torch.ones(2)})
    assert attack("sign-flip").update("north", gradients, came, 0, 1).tensors["g"].tolist() == [-10.0, -10.0]


@pytest.mark.parametrize(("settings", "words"), [
    ({"poisoning.sites": ["nowhere"], "poisoning.attack": "scale"}, "poisoning.sites: there is no site 'nowhere'"),
    (
        {"poisoning.sites": ["site-1"], "poisoning.attack": "backdoor", "poisoning.target": 9},
        "poisoning.target: there is no class 9",
    ),
    (
        {"poisoning.sites": ["site-1"], "poisoning.attack": "label-flip", "data.source": "hand-phantom"},
        "changes classes, and the",
    ),
])  # fmt: skip
def test_attackers_that_a_study_does_not_have(tiny, tmp_path, settings, words):
    more = {"task": {"name": "regression"}} if "data.source" in settings else {}
    with pytest.raises(BadInput, match=words):
        run(tiny("fedavg", settings | more, rounds=1), tmp_path / "run")


def test_no_deployed_site_is_asked_to_attack(tiny):
    settings = {
        "poisoning.sites": ["site-1"],
        "poisoning.attack": "scale",
        "data": {"source": "at-sites", "dataset": "x", "size": 28},
    }
    with pytest.raises(BadInput, match=r"\[poisoning\]: attackers are for simulations"):
        tiny("fedavg", settings)


def test_a_defence_changes_gradients_and_what_weights_moved_by():
    gradients = Parcel("gradients", {"g": torch.tensor([1.0, -4.0, 2.0, 3.0])}, {"samples": 5})
    kept = Defence(name="sparsify", keep=0.5)(gradients, {})
    assert kept.tensors["g"].tolist() == [0.0, -4.0, 0.0, 3.0]
    assert kept.metadata == {"samples": 5}
    assert Defence(name="prune", fraction=0.25)(gradients, {}).tensors["g"].tolist() == [0.0, -4.0, 2.0, 3.0]
    start = Parcel("weights", {"w": torch.tensor([10.0, 10.0, 10.0])})
    sent = Parcel("weights", {"w": torch.tensor([11.0, 7.0, 12.0]), "n": torch.tensor(3), "own": torch.ones(1)})
    moved = Defence(name="sparsify", keep=1 / 3)(sent, {"weights": start})
    assert {name: one.tolist() for name, one in moved.tensors.items()} == {"w": [10.0, 7.0, 10.0], "n": 3, "own": [1.0]}
    levels = Defence(name="quantise", bits=2)(sent, {"weights": start}).tensors["w"]
    assert levels.tolist() == [10.0, 7.0, 13.0]  # steps of 3: plus and minus the largest, and nothing
    for other in (sent, Parcel("metrics", {"m": torch.ones(2)})):
        assert Defence(name="sparsify")(other, {}) is other
