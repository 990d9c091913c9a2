"""A deployed site passes its layers in the order of the lists, and every one of them can refuse: what comes after it is
not done, the site's state is put back, and a failure that nobody foresaw suspends the study once the work has begun."""

from dataclasses import replace

import pytest

from polyclinic.data.allowed_paths import COORDINATOR
from polyclinic.data.parts import open_site, prepare
from polyclinic.federation.call import Call
from polyclinic.federation.host import SiteHost
from polyclinic.federation.layers import DEPLOYED
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.keys import SeedKeys, sign_anchor
from polyclinic.federation.ledger.kinds import KINDS, ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Policy
from polyclinic.federation.site import Kit
from polyclinic.runner.run.assembly import Assembly

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
