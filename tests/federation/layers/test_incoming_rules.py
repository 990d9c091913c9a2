"""Rules of the incoming check, and that every layer refuses."""

from dataclasses import replace

import pytest
import torch
from one_site import FIRST, LAST, LIMITS, Asked, changed, inspect, make_check, make_site, own

from polyclinic import run
from polyclinic.data.allowed_paths import COORDINATOR
from polyclinic.data.parts import open_site, prepare
from polyclinic.federation.call import Call, DataDependentRefusal
from polyclinic.federation.host import SiteHost
from polyclinic.federation.layers import DEPLOYED
from polyclinic.federation.layers import incoming as inspection
from polyclinic.federation.layers import incoming_figures as course
from polyclinic.federation.layers.incoming import one_pass
from polyclinic.federation.layers.incoming_figures import History, dominances, lengths
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.keys import SeedKeys, sign_anchor
from polyclinic.federation.ledger.kinds import KINDS, ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Incoming, Policy
from polyclinic.federation.site import Kit, SiteState
from polyclinic.files import read_tensors
from polyclinic.methods import METHODS
from polyclinic.runner.run.assembly import Assembly


@pytest.mark.parametrize(("declared", "sealed", "kept"), [
    (Asked.train, False, {"last", "passed"}),
    (None, False, {"last", "passed"}),
    (Asked.evaluate, False, set()),  # scores are not compared with a course
    (Asked.finish, False, set()),  # the run is over
    (Asked.encode, False, {"seen"}),  # the front was trained elsewhere
    (Asked.tune, False, {"last"}),  # may be called as often as one likes; the beginning is remembered
    (Asked.train, True, {"seen"}),
    (Asked.evaluate, True, {"seen"}),
])  # fmt: skip
def test_what_is_remembered_of_weights_by_what_they_came_for(declared, sealed, kept):
    site = make_site()
    inspect(site, FIRST, declared=declared, sealed=sealed)
    assert {name.split("/")[1] for name in site.state} & {"last", "passed", "seen"} == kept


@pytest.mark.parametrize(("images", "inspected"), [(3, False), (4, True)])
def test_a_site_with_next_to_no_images_tries_nothing(images, inspected):
    site = make_site(images=images)
    inspect(site, FIRST)
    assert ("last" in {name.split("/")[1] for name in site.state}) is inspected


def test_weights_pass_again_as_thoroughly_and_only_where_inspected():
    site = make_site()
    check = inspect(site, FIRST, sealed=True)
    check._inspect_weights = None
    inspect(site, FIRST, sealed=True, check=check)
    with pytest.raises(TypeError):
        inspect(site, FIRST, check=check)
    history = History(SiteState())
    history.take_passed("x", has_course=True)
    assert history.has_passed("x", has_course=True)
    assert history.has_passed("x", has_course=False)
    assert not history.has_passed("y", has_course=False)
    history.take_passed("y", has_course=False)
    assert history.has_passed("y", has_course=False)
    assert not history.has_passed("y", has_course=True)
    site, huge = make_site(), {"x": torch.full((4, 9), 1e7)}
    inspect(site, huge, kind="statistics")
    assert not make_check(Incoming(on=False)).is_needed()
    for kind in ("weights", "gradients", "generator"):
        with pytest.raises(ParcelRejected, match="incoming check: largest of 'x'"):
            inspect(site, huge, kind=kind)


def test_weights_that_moved_too_far_are_refused_and_the_first_remembered():
    site = make_site()
    with pytest.raises(DataDependentRefusal, match=f"moved of '{LAST}'") as refused:
        inspect(site, changed(times=4.0))
    assert "missed" not in str(refused.value)
    site.round = 4
    with pytest.raises(DataDependentRefusal, match=f"moved of '{LAST}'.*; the site missed 3 rounds before"):
        inspect(site, changed(times=40.0))
    assert not any("passed" in name for name in site.state)
    site = make_site()
    inspect(site, changed(times=1.05))
    assert int(site.state[f"{History.GROUP}/round/last"]) == 1
    with pytest.raises(DataDependentRefusal, match="moved of"):
        inspect(make_site(), changed(times=4.0))
    site, check = make_site(), make_check(LIMITS, first=None)
    inspect(site, changed(times=3.0), check=check)
    with pytest.raises(DataDependentRefusal, match="moved of"):
        inspect(site, FIRST, check=check)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [({"lr": 0.1}, ""), ({"lr": 0.11}, "sgd_rate of 'the study' is 0.11, and 0.1 is the limit; choose a smaller")],
)
def test_the_largest_rate_of_sgd(optimizer, words):
    check, site = make_check(LIMITS), make_site(**optimizer)
    [figure] = check._steps(site, FIRST)
    assert (figure.where, figure.value, figure.limit) == ("the study", optimizer["lr"], LIMITS.sgd_rate)
    if words:
        with pytest.raises(ParcelRejected, match=words):
            inspect(site, FIRST)


def test_one_step_of_adam_moves_every_number_by_its_rate():
    check, site = make_check(LIMITS), make_site(name="adam", lr=0.5, warmup=5)
    figures = {figure.where: figure for figure in check._steps(site, {"fc.weight": torch.tensor([[3.0, 4.0]] * 2)})}
    assert figures["fc"].value == pytest.approx(0.5 * 2**0.5 / 5)
    assert figures["fc"].limit == LIMITS.step


def test_what_arrives_is_bounded_by_what_came_and_by_one_image():
    site = make_site()
    for length in (1.0, 100.0, 50.0, 9_999.0):
        inspect(site, {"g": torch.tensor([length])}, kind="generator")
    assert History(site.state).most("generator") == {"g": 9_999.0}
    with pytest.raises(DataDependentRefusal, match="longer of 'g' is 200, and 100 is the limit"):
        inspect(site, {"g": torch.tensor([1_999_800.0])}, kind="generator", limits=Incoming(largest=1e9))
    assert list(lengths({"a": 5.0, "b": 5.0}, {"b": 2.0, "c": 1.0}, LIMITS)) == [("longer", "b", 2.5, 100.0)]
    assert list(lengths({"a": 5.0}, {"a": 0.0}, LIMITS)) == []
    site = make_site()
    single = torch.zeros(4, 3)
    single[2] = 1.0
    with pytest.raises(DataDependentRefusal, match="dominance of 'activations' is 1"):
        inspect(site, {"activations": 1e-3 * single}, kind="gradients")  # the first one, however short
    inspect(site, {"activations": torch.ones(4, 3)}, kind="gradients")
    inspect(site, {"activations": single}, kind="gradients")
    with pytest.raises(DataDependentRefusal, match="dominance of 'activations' is 1"):
        inspect(site, {"activations": 10 * single}, kind="gradients")
    inspect(site, {"generated": 10 * single}, kind="generator")  # a generator has no rows of images


@pytest.mark.parametrize(
    ("gradient", "share"),
    [([[3.0, 4.0], [0.0, 5.0], [5.0, 0.0], [3.0, -4.0]], 0.25), ([[1e-20], [0], [0], [0]], 1.0), ([[0.0]] * 4, 0.0)],
)
def test_the_share_of_one_image_in_a_gradient(gradient, share):
    [figure] = dominances({"g": torch.tensor(gradient)}, LIMITS)
    assert figure == ("dominance", "g", pytest.approx(share), 0.9)


def test_a_correction_that_moves_too_far_is_refused_and_others_count_by_their_length():
    site = make_site()
    inspect(site, FIRST)
    control = {f"{LAST}.weight": torch.full_like(FIRST[f"{LAST}.weight"], 1e4)}
    with pytest.raises(DataDependentRefusal, match=f"moved of '{LAST} by the control variate'"):
        inspect(site, control, kind="gradients")
    small = {name: one * 1e-6 for name, one in control.items()}
    inspect(site, {**small, "other": torch.ones(2)}, kind="gradients")
    assert set(History(site.state).most("gradients")) == {"other"}


@pytest.mark.parametrize(("metadata", "steps"), [({"steps": 3}, 3), ({"steps": 1}, 1), ({}, 2), ({"steps": 0}, 2)])
def test_own_training_counts_by_its_steps(metadata, steps):
    """Where it does not say how many, by one pass: 20 images in batches of 8."""
    site = make_site()
    check = inspect(site, FIRST)
    check.note_own(site, [Parcel("weights", changed(), metadata)])
    assert own(site) == pytest.approx({LAST: steps * course.LONGEST_STEP})
    assert one_pass(site) == 2


@pytest.mark.parametrize(("name", "by_sign"), [("sgd", False), ("adam", True), ("adamw", True)])
def test_a_gradient_that_leaves_counts_as_one_step_along_it(name, by_sign):
    site = make_site(name=name, lr=1e-3)
    check = inspect(site, FIRST)
    gradients = {name: torch.full_like(one, 0.5) for name, one in FIRST.items() if name.startswith(LAST)}
    check.note_own(site, [Parcel("gradients", gradients)])
    last = History(site.state).last()
    expected = course.movement(course.stepped(last, gradients, 1e-3, by_sign=by_sign), last)
    assert own(site) == pytest.approx({LAST: expected[LAST]})
    check.note_own(site, [Parcel("gradients", {name: one * 1e9 for name, one in gradients.items()})])
    assert own(site)[LAST] <= course.LONGEST_STEP


@pytest.mark.parametrize(("losses", "steps"), [((1.0, 9.99), 4), ((1.0, 10.01), 1), ((1.0, float("nan")), 1)])
def test_a_loss_up_to_ten_times_the_largest_has_not_exploded(monkeypatch, losses, steps):
    site, told = make_site(), iter(losses)
    check = inspect(site, FIRST)
    monkeypatch.setattr(inspection, "_loss", lambda site, weights: next(told))
    check.note_own(site, [Parcel("weights", changed(), {"steps": 4})])
    assert own(site) == pytest.approx({LAST: steps * course.LONGEST_STEP})


@pytest.mark.parametrize("why", ["nothing arrived", "nothing trained leaves", "another network"])
def test_nothing_is_remembered_of_what_is_no_training_of_the_sites_network(why):
    site = make_site()
    check = make_check(LIMITS)
    if why != "nothing arrived":
        inspect(site, FIRST)
    sent = Parcel("metrics", changed()) if why == "nothing trained leaves" else Parcel("weights", changed())
    if why == "another network":
        sent = Parcel("weights", {"other.weight": torch.ones(2, 2)})
    check.note_own(site, [sent])
    assert own(site) == {}


def test_own_training_counts_with_its_rate_and_its_own_part():
    site = make_site()
    check = inspect(site, FIRST)
    site.state.put("local", {name: one for name, one in changed().items() if name.startswith(LAST)})
    check.note_own(site, [Parcel("weights", {name: one for name, one in FIRST.items() if not name.startswith(LAST)})])
    assert own(site)[LAST] == pytest.approx(2 * course.LONGEST_STEP)
    site = make_site(round=3, decay_every=1, decay=0.1)
    check, history = make_check(LIMITS), History(site.state)
    history.take_movement({"fc": 0.4}, lr=0.1)
    for round, share in ((1, 1.0), (2, 1.0), (3, 0.1), (4, 0.01)):
        site.round = round
        assert check._own(site, history) == pytest.approx({"fc": 0.4 * share})
    assert check._lr(site) == pytest.approx(1e-4)
    assert check._lr(site, 2) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("moved", "known", "rehearsed"), [(0.15, False, False), (0.151, False, True), (9.0, True, False)]
)
def test_a_site_rehearses_where_weights_moved_and_it_has_not_trained(moved, known, rehearsed):
    site = make_site()
    check, history = inspect(site, FIRST), History(site.state)
    if known:
        history.take_movement({"conv1": 1e-3}, 0.1)
    before = own(site)
    check._rehearse_before(site, history, {})
    assert own(site) == before
    check._rehearse_before(site, history, {"conv1": moved})
    assert (own(site) != before) is rehearsed


def test_a_rehearsal_is_plain_training_in_a_copy_of_the_network():
    """Also in round 0, before the first: at the rate of the first round."""
    site, weights = make_site(round=0, decay_every=1, decay=1e-9), changed(times=1.05)
    held = site.trainer.weights()
    one, two = (inspection.rehearse(site, weights, steps) for steps in (1, 2))
    assert all(torch.equal(tensor, held[name]) for name, tensor in site.trainer.weights().items())
    assert one.keys() == FIRST.keys()
    first, second = (max(course.movement(after, weights).values()) for after in (one, two))
    assert 1e-4 < first < second
    again = inspection.rehearse(site, weights, 1)
    assert all(torch.equal(one[name], again[name]) for name in one)
    site.round = 2
    assert max(course.movement(inspection.rehearse(site, weights, 2), weights).values()) < 1e-6


GAN = {"name": "dcgan", "width": 4, "latent": 8, "steps": 2}
FLOW = {"name": "flow", "steps": 2, "batch_size": 4, "width": 8, "levels": 2, "blocks": 1, "sample_steps": 2}
SETTINGS = {
    **{name: ({"generator": GAN, "tuning": {"on": False}}, {"buffer": 8}) for name in ("feder", "feder-a", "feder-b")},
    "felicia": ({"generator": GAN}, {"steps": 2, "learner_steps": 3, "schedule": "local", "exchange_every": 1}),
    "fedsamples": ({"generator": FLOW}, {"looks": 1}),
    "cwt-replay": ({"generator": GAN, "replay": {"probe": False, "codes": "prior", "samples": 8}}, {}),
    "fedavg-replay": ({"generator": GAN, "replay": {"probe": False, "codes": "prior", "samples": 8}}, {}),
}
#: these say nothing of arriving weights that a quicker method does not
LONG = ("fedavg-replay", "feder", "feder-b", "finetune", "fedrep", "ditto", "moon")


@pytest.mark.parametrize("method", [
    pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
    for name in METHODS.builtin
    if not METHODS[name].traits.needs_encoder
])  # fmt: skip
def test_an_honest_run_passes_and_ends_in_the_same_weights(tiny, undisturbed, tmp_path, method):
    tables, settings = SETTINGS.get(method, ({}, {}))
    tables = {**tables, "sites.count": 2, "data.samples": 48}
    if method == "fedbn":
        tables["model.backbone"] = "small-cnn"
    plain = undisturbed(tiny(method, tables, rounds=2, **settings))
    checked = tiny(method, {**tables, "policy.incoming": {"on": True}}, rounds=2, **settings)
    assert run(checked, tmp_path / "run")["weights_sha256"] == plain["weights_sha256"]


@pytest.mark.parametrize(("from_file", "kept"), [(False, {"last", "own", "passed"}), (True, {"last", "own", "loss"})])
def test_the_history_lies_in_the_sites_state_and_begins_with_weights_from_a_file(tiny, tmp_path, from_file, kept):
    plain = run(tiny("fedavg", {"sites.count": 2}, rounds=1), tmp_path / "plain")
    assert not list(plain.folder.glob("sites/*/state-*.safetensors"))
    first = {"model.backbone": "lenet5", "model.weights": str(plain.folder / "model.safetensors")} if from_file else {}
    result = run(
        tiny("fedavg", {"policy.incoming": {"on": True}, "sites.count": 2, **first}, rounds=2), tmp_path / "run"
    )
    for state in result.folder.glob("sites/*/state-*.safetensors"):
        assert {name.split("/")[1] for name in read_tensors(state) if name.startswith(History.GROUP)} >= kept


def test_a_simulated_site_refuses_what_is_above_a_limit(tiny, tmp_path):
    """A limit that no round can hold: every site fails in the first round after the first weights."""
    study = tiny(
        "fedavg",
        {"policy.incoming": {"on": True, "moved": 1e-9, "times_own": 0.0}, "engine.on_failure": "stop"},
        rounds=2,
    )
    with pytest.raises(Exception, match="moved of"):
        run(study, tmp_path / "run")


HOOKS = ("arriving", "leaving", "left")
PLACES = [(hook, layer) for hook in HOOKS for layer in getattr(DEPLOYED, hook)]
POLICY = Policy(kinds=tuple(set(KINDS.builtin) - {"real-images"}), deployed=True, min_cohort=1, few_images="allow")


@pytest.fixture
def passed(monkeypatch):
    """The places that a call has passed; the one in `refused` raises its error."""
    noted, refused = [], {}

    def noting(hook, layer):
        honest, is_needed = getattr(layer, hook), layer.is_needed

        def passing(self, *given):
            if type(self) is layer:
                noted.append((hook, layer))
                if (hook, layer) in refused:
                    raise refused[hook, layer]
            return honest(self, *given) if is_needed(self) else given[-1]

        monkeypatch.setattr(layer, hook, passing)

    for hook, layer in dict.fromkeys(PLACES):
        noting(hook, layer)
    return noted, refused


class SiteWithKit:
    """One deployed site with a kit of its own, that has trained one round of FedAvg, and the call of the next one."""

    def __init__(self, study, folder):
        parts = prepare(study.data, study.sites)
        kit, self.name, keys = folder / "kit", parts.names[0], SeedKeys(1)
        (kit / "runs" / "run").mkdir(parents=True)
        assembly = Assembly(study, parts, kit / "runs" / "run", POLICY, lambda name: open_site(parts.folder, name))
        self.suspensions = Suspensions(kit)
        people = Kit(
            site=self.name,
            suspensions=self.suspensions,
            keys=keys,
            anchors=kit / "anchors",
            require_approval=lambda: None,
        )
        self.host = SiteHost(replace(assembly.host_spec(), kit=people))
        weights = {"weights": Parcel("weights", assembly.initial_weights())}
        self.host.handle(Call(self.name, "train", 1, weights))
        anchor = sign_anchor(keys.signing_key(COORDINATOR), "run", self.name, self.ledger.head)
        self.call = Call(self.name, "train", 2, weights, anchor=anchor)

    @property
    def ledger(self):
        return self.host.sites.ledgers[self.name]

    @property
    def state(self):
        return {name: id(one) for name, one in self.host.sites.get(self.name).state.items()}


@pytest.fixture
def study(tiny):
    return tiny("fedavg", {"data.samples": 48, "audit.keep_parcels": 1})


def test_a_call_passes_the_lists_from_the_first_line_to_the_last(study, passed, tmp_path):
    site, (noted, _) = SiteWithKit(study, tmp_path), passed
    noted.clear()
    site.host.handle(site.call)
    assert noted == [(hook, layer) for hook, layer in PLACES if site.host.layers[layer].is_needed()]


@pytest.mark.parametrize(("hook", "layer"), PLACES, ids=lambda one: getattr(one, "__name__", one))
def test_what_a_layer_refuses_has_not_happened(study, passed, tmp_path, monkeypatch, hook, layer):
    monkeypatch.setattr(layer, "is_needed", lambda self: True)
    noted, refused = passed
    for error in (ParcelRejected("made up"), RuntimeError("made up")):
        refused.clear()
        site = SiteWithKit(study, tmp_path / type(error).__name__)
        before, lines = site.state, site.ledger.position.lines
        refused[hook, layer] = error
        assert site.host.handle_group([site.call]) == [error]
        assert noted[-1] == (hook, layer), "nothing looks at it any more"
        assert site.state == before
        assert (site.ledger.position.lines > lines) is (hook == "left")
        assert bool(site.suspensions.all()) is (hook != "arriving" and type(error) is RuntimeError)
