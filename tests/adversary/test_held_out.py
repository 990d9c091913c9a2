"""Attack: learn about held-out images by scoring chosen weights again and again, or by moving images between splits."""

import hashlib

import pytest
import torch
from attacked_site import PRIVATE, SITE, ask, first_weights, study

from polyclinic import __version__
from polyclinic.deployment.approval import Approvals
from polyclinic.deployment.approval_rules import policy_of
from polyclinic.deployment.study_in_words import Asked
from polyclinic.errors import BadInput
from polyclinic.federation.call import GateRefused
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import verify
from polyclinic.tasks.classification import Classification


def images_of(host, split):
    return {
        hashlib.sha256(image.tobytes()).hexdigest() for image in getattr(host.sites.get("north").data, split).images
    }


@pytest.mark.parametrize("change", [{"data__seed": 1}, {"data__seed": 7, "data__test": 0.5, "data__validation": 0.3}])
def test_every_study_gets_the_same_split(kit, change):
    first = kit.host("first")
    splits = {name: images_of(first, name) for name in ("train", "validation", "test")}
    assert {name: images_of(kit.host("second", **change), name) for name in splits} == splits
    assert (kit.folder / "local" / "splits.json").stat().st_mode & 0o777 == 0o600


def test_a_study_has_no_say_in_the_split_and_showing_it_writes_nothing(kit):
    """Not the first one either: 60 images, of which 20 % are for test and 15 % for validation."""
    kit.policy(approve="")
    approvals, greedy = Approvals(kit.folder, SITE), {"data__test": 0.9, "data__validation": 0.05}
    asked = study(privacy=PRIVATE, **greedy)
    approvals.request("evil", asked, __version__)
    before = sorted(kit.folder.rglob("*"))
    told = Asked(asked, SITE, kit.folder, policy_of(approvals.policy_file)).sentences(None)
    assert sorted(kit.folder.rglob("*")) == before
    assert any(
        "whatever the study says: 20% for test, 15% for validation, the rest for training" in one for one in told
    )
    assert any("for one of 39 images" in one for one in told)
    kit.policy()
    host = kit.host("first", **greedy)
    assert [len(images_of(host, name)) for name in ("train", "validation", "test")] == [39, 9, 12]


@pytest.mark.parametrize("setting", ["test_per_class", "test_total_per_class"])
def test_a_study_does_not_choose_test_images_by_class(kit, setting):
    with pytest.raises(BadInput, match=rf"data\.{setting}: a deployed site has one split for all studies"):
        kit.host(**{f"data__{setting}": 5})


def test_two_sites_with_the_same_images_split_them_each_in_their_own_way(kit):
    before = images_of(kit.host("first"), "test")
    (kit.folder / "local" / "splits.json").unlink()  # as at another site
    assert images_of(kit.host("second"), "test") != before


def test_the_sites_own_people_may_choose_the_split(kit):
    file = kit.folder / "local" / "site.toml"
    file.write_text(file.read_text() + "test = 0.5\nseed = 3\n")
    host = kit.host(data__seed=9)
    assert len(images_of(host, "test")) == 30


def test_folds_would_make_training_images_of_test_images(kit):
    with pytest.raises(BadInput, match=r"data\.fold: a deployed site has one split for all studies"):
        kit.host(data__fold="1/5")


def test_weights_of_its_choice_are_scored_once_a_round(kit):
    """Even at an epsilon budget of next to nothing, which is about training images; and test images at the very end."""
    kit.policy(max_epsilon=1e-6)
    host = kit.host(privacy=PRIVATE)
    chosen = [{name: tensor + number for name, tensor in first_weights(host).items()} for number in range(4)]
    assert ask(host, "evaluate", 1, weights=chosen[0]).parcels
    for split in ("validation", "test"):
        with pytest.raises(GateRefused, match="has released its scores of round 1 already"):
            ask(host, "evaluate", 1, weights=chosen[1], split=split)
    assert ask(host, "evaluate", 3, weights=chosen[1]).parcels
    assert ask(host, "evaluate", 3, weights=chosen[2], split="test").parcels
    with pytest.raises(GateRefused, match="has released its scores of round 3 already"):
        ask(host, "evaluate", 3, weights=chosen[3], split="test")
    assert Suspensions(kit.folder).all() == []


@pytest.mark.parametrize("number", [4, -1, 1.5, "1", True])
def test_a_study_has_its_rounds_and_no_others(kit, number):
    host = kit.host()
    with pytest.raises(ParcelRejected, match="the study has rounds 0 to 3"):
        ask(host, "evaluate", number, weights=first_weights(host))


def test_putting_the_site_back_gives_no_more_than_two_scores_more(kit):
    host = kit.host()
    weights = first_weights(host)
    ask(host, "evaluate", 1, weights=weights)
    host.restore({})
    assert ask(host, "evaluate", 1, weights=weights).parcels  # the same answer again tells nothing
    # an interrupted run may have lost another site meanwhile, and have another model; but not as often as it likes
    chosen = [{name: number * tensor for name, tensor in weights.items()} for number in (-1, 2, 3)]
    for one in chosen[:2]:
        ask(host, "evaluate", 1, weights=one)
    for _ in range(2):
        host.restore({})
        with pytest.raises(GateRefused, match="already"):
            ask(host, "evaluate", 1, weights=chosen[2])


def test_scores_have_a_budget_over_all_runs_that_is_asked_before_the_work(kit, monkeypatch):
    kit.policy(max_scores=3)
    for run, number in (("a", 1), ("a", 2), ("b", 1)):
        host = kit.host(run)
        ask(host, "evaluate", number, weights=first_weights(host))
    host = kit.host("c")
    monkeypatch.setattr(type(host.spec.trainer), "evaluate", lambda *a: pytest.fail("the site worked nevertheless"))
    with pytest.raises(GateRefused, match=r"4 scores would have left this site, and its policy allows 3"):
        ask(host, "evaluate", 1, weights=first_weights(host))


def test_a_policy_that_says_nothing_about_scores_allows_a_thousand(kit):
    assert kit.host().spec.policy.max_scores == 1000


def test_no_bin_and_no_cell_is_about_a_few_images(kit):
    kit.policy(min_cohort=5, scores="coarse")
    file = kit.folder / "local" / "site.toml"
    file.write_text(file.read_text() + "test = 0.5\nvalidation = 0.2\n")
    host = kit.host()
    [parcel] = ask(host, "evaluate", 1, weights=first_weights(host), split="test").parcels
    histograms, confusion = parcel.tensors["histograms"], parcel.tensors["confusion"]
    assert len(host.sites.get("north").data.test) == 30
    for row in histograms.reshape(-1, 1024):
        changes = torch.cat([torch.ones(1, dtype=torch.bool), row[1:] != row[:-1]]).cumsum(0)
        images = [float(row[changes == run].sum()) for run in changes.unique()]
        assert min((one for one in images if one), default=5) > 4.99  # runs of equal bins are all that is told
    assert set((confusion % 2).flatten().tolist()) == {0}
    scores = host.spec.trainer.task.finish(parcel.tensors)
    assert set(scores) == {"accuracy", "balanced_accuracy", "loss", "auc"}
    assert verify(kit.folder / "runs" / "run" / "ledger" / "north.jsonl")[-1]["digest"] == parcel.digest


def test_an_image_that_stands_out_shows_in_no_bin_and_in_no_loss(kit, monkeypatch):
    """Weights that score one image far from all others: its bin, and the mean loss, told that it is there."""
    kit.policy(min_cohort=5, scores="coarse")
    file = kit.folder / "local" / "site.toml"
    file.write_text(file.read_text() + "test = 0.5\nvalidation = 0.2\n")
    told, weights = [], first_weights(kit.host("first"))
    for margin in (2.0, 30.0, 900.0):

        def observe(self, output, targets, target, margin=margin):
            """As weights would that know one image, and are wrong about it by this much."""
            logits = output.detach().double()
            logits[0] = torch.tensor([0.0, margin]) if int(targets[0]) == 0 else torch.tensor([margin, 0.0])
            return logits

        monkeypatch.setattr(Classification, "observe", observe)
        host = kit.host(f"margin{margin:.0f}")
        told.append(ask(host, "evaluate", 1, weights=weights, split="test").parcels[0].tensors)
    assert float(told[0]["histograms"].sum()) > 0
    for name, tensor in told[0].items():
        assert all(torch.equal(tensor, other[name]) for other in told), name


def test_scores_of_private_head_are_bounded_as_all_others_are(kit, monkeypatch):
    """It scores from features that are kept, by itself. Bounded to nothing, all weights score alike."""
    kit.policy(min_cohort=2, scores="coarse")
    monkeypatch.setattr(Classification, "bounded", lambda self, observed, target: 0 * observed)
    encoder = {"backbone": "efficientnet-lite0-1024", "input_size": 32}
    method = {"name": "private-head", "rounds": 1, "numbers": 4, "phantoms": 10}
    told = []
    for factor in (1.0, -1000.0):
        host = kit.host(
            f"by{factor:.0f}", model=encoder, method=method, privacy={"noise_multiplier": 1.0, "max_grad_norm": 1.0}
        )
        weights = {"fc.weight": factor * torch.ones(2, 1024).cumsum(0), "fc.bias": torch.zeros(2)}
        told.append(ask(host, "evaluate", 1, weights=weights, split="test").parcels[0].tensors)
    assert all(torch.equal(told[0][name], told[1][name]) for name in told[0])


@pytest.mark.parametrize("first", ["scores", "statistics"])
def test_statistics_are_told_of_the_model_that_was_scored(kit, first):
    """Of another one, the difference of the two would tell of single images."""
    host = kit.host(evaluation={"statistics": True})
    weights = first_weights(host)
    other = {name: tensor + 0.01 for name, tensor in weights.items()}
    asked = {"scores": ("evaluate", {"split": "test", "own": "none"}), "statistics": ("give_statistics", {})}
    second = next(name for name in asked if name != first)
    operation, arguments = asked[first]
    assert ask(host, operation, 3, weights=weights, **arguments).parcels
    operation, arguments = asked[second]
    with pytest.raises(
        GateRefused,
        match=f"came for another model than the one whose {'metrics' if first == 'scores' else 'statistics'}",
    ):
        ask(host, operation, 3, weights=other, **arguments)
    assert ask(host, operation, 3, weights=weights, **arguments).parcels
