"""Recorder of checks: which concern looks at a call or an answer, in which order, in a run of each method.

`CONCERNS` says where each concern lives in the code: update it when code moves. `order_of_checks.json` has the order,
which stays. `python tests/federation/recorded_checks.py --write` records it again.
"""

import contextlib
import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyclinic.data.allowed_paths import COORDINATOR
from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call
from polyclinic.federation.host import SiteHost
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.keys import SeedKeys, sign_anchor
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.site import Kit
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.run import run
from polyclinic.study import Study

RECORDED = Path(__file__).with_name("order_of_checks.json")
ROOM = "polyclinic.federation"

#: where each concern of a site is looked up, in the words of the lists of layers
CONCERNS: dict[str, str] = {
    "name": f"{ROOM}.host:OpenSites.refuse_other_names",
    "approval": "recorded_checks:approved",
    "stopped": f"{ROOM}.layers.suspension:Suspensions.refuse_while_any",
    "call": f"{ROOM}.layers.call_checks:TakenCall.arriving",
    "sum asked": f"{ROOM}.layers.call_checks:SumSteps.arriving",
    "round": f"{ROOM}.layers.call_checks:RoundOfStudy.arriving",
    "anchor": f"{ROOM}.layers.call_checks:CountersignedHead.arriving",
    "once a round": f"{ROOM}.layers.call_checks:check_once",
    "order of rounds": f"{ROOM}.layers.call_checks:check_order",
    "weights that were scored": f"{ROOM}.layers.call_checks:ScoredWeights.check",
    "rounds left out": f"{ROOM}.layers.call_checks:ScoredWeights.check_left_out",
    "round begun": f"{ROOM}.layers.call_checks:ScoredWeights.begin",
    "model that was scored": f"{ROOM}.layers.leaving:ScoredModel.check",
    "reservation": f"{ROOM}.layers.gate:Gate.reserved",
    "unseal": f"{ROOM}.layers.call_checks:unseal",
    "expected": f"{ROOM}.call:Expected.check",
    "argument": f"{ROOM}.layers.call_checks:check_argument",
    "incoming": f"{ROOM}.layers.incoming:Inspection._inspect",
    "archive begins": f"{ROOM}.ledger.archive:ParcelArchive.begins",
    "transcript": f"{ROOM}.layers.leaving:extend",
    "noted batches": "polyclinic.training.loop:Trainer.note_batches",
    "random shares": "polyclinic.training.loop:Trainer.random_shares",
    "work": f"{ROOM}.host:seeded",
    "covered by privacy": f"{ROOM}.layers.leaving:check_all_covered",
    "incoming, own training": f"{ROOM}.layers.incoming:Inspection._note_own",
    "defence": f"{ROOM}.layers.defence:Defence.__call__",
    "poisoning": f"{ROOM}.layers.defence:Poisoning.update",
    "coarse scores": f"{ROOM}.layers.leaving:coarse_scores",
    "no training loss": f"{ROOM}.layers.leaving:without_loss",
    "drawn patients": f"{ROOM}.layers.cohort:DrawnPatients.leaving",
    "scores once": f"{ROOM}.layers.call_checks:check_scores",
    "sum": f"{ROOM}.sums.site_sums:SiteSums.outgoing",
    "rounding": f"{ROOM}.layers.leaving:shortened",
    "cohort": f"{ROOM}.layers.gate:count_patients",
    "gate": f"{ROOM}.layers.gate:Gate.release",
    "kind": f"{ROOM}.layers.gate:Gate._check_policy",
    "finite": f"{ROOM}.layers.gate:check_finite",
    "raw images": f"{ROOM}.layers.gate:Gate._check_raw",
    "encodes": f"{ROOM}.layers.gate:check_encodes",
    "seal": f"{ROOM}.layers.gate:seal",
    "budget": f"{ROOM}.layers.gate:Gate._check_budget",
    "epsilon of the study": f"{ROOM}.ledger.budget:EpsilonLimit.check",
    "line of the ledger": f"{ROOM}.ledger.ledger:Ledger.append",
    "answer noted": f"{ROOM}.layers.call_checks:AnsweredCalls.note",
    "scored weights noted": f"{ROOM}.layers.call_checks:ScoredWeights.note",
    "scored model noted": f"{ROOM}.layers.leaving:ScoredModel.note",
    "archive": f"{ROOM}.ledger.archive:ParcelArchive.released",
}
#: what has nothing to compare with where no site's people have a kit
OF_A_KIT = ("name", "approval", "stopped", "anchor")
#: contexts around the work, which do not see each other
AROUND = ("noted batches", "random shares")
#: the same for the coordinator, which looks at a reply
OF_REPLIES: dict[str, str] = {
    "row of a sum": f"{ROOM}.sums.coordinator_sums:CoordinatorSums.check",
    "expected": f"{ROOM}.call:Expected.check",
    "reply": f"{ROOM}.layers.replies:ReplyCheck.check",
    "head of the ledger": f"{ROOM}.layers.replies:Heads.receive",
    "traffic": f"{ROOM}.layers.replies:Communication.came",
    "privacy coverage": f"{ROOM}.layers.replies:Coverage.note",
}

Tables = dict[str, Any]
BASE: Tables = {
    "data": {"source": "fundus-phantom", "size": 28, "samples": 48, "validation": 0.2, "test": 0.2},
    "sites": {"partition": "iid", "count": 3},
    "model": {"backbone": "lenet5"},
    "optimizer": {"lr": 0.01, "batch_size": 4},
    "engine": {"workers": 1, "device": "cpu", "durable": False, "on_failure": "stop"},
    "evaluation": {"select": "last"},
}
DCGAN = {"name": "dcgan", "width": 2, "latent": 4, "steps": 2, "batch_size": 8}
ENCODER = {"backbone": "efficientnet-lite0-1024", "input_size": 32}
#: studies that together ask for every operation that is cheap to run, and have every concern at work
STUDIES: dict[str, Tables] = {
    "fedavg": {"method": {"name": "fedavg"}, "audit": {"keep_parcels": 1}},
    "fedavg, rounded": {"method": {"name": "fedavg"}, "engine": {**BASE["engine"], "wire": "fp16"}},
    "fedavg, difference": {"method": {"name": "fedavg"}, "engine": {**BASE["engine"], "wire": "delta"}},
    "fedavg, private": {
        "method": {"name": "fedavg"},
        "privacy": {"on": ["classifier"], "noise_multiplier": 1.0, "max_grad_norm": 1.0, "target_epsilon": 1000.0},
    },
    "fedavg, all covered": {
        "method": {"name": "fedavg"},
        "privacy": {
            "on": ["classifier"],
            "noise_multiplier": 1.0,
            "max_grad_norm": 1.0,
            "cover": "all",
            "score_noise": 1.0,
        },
    },
    "fedavg, secure sum": {"method": {"name": "fedavg"}, "federation": {"sum": "secure"}, "audit": {"keep_parcels": 1}},
    "fedavg, whole numbers": {"method": {"name": "fedavg"}, "federation": {"sum": "integer"}},
    "fedsgd": {"method": {"name": "fedsgd"}, "defence": {"name": "sparsify"}},
    "scaffold": {"method": {"name": "scaffold"}},
    "ditto": {"method": {"name": "ditto"}},
    "finetune": {"method": {"name": "finetune", "tuning_steps": 1}},
    "standalone": {"method": {"name": "standalone"}},
    "cwt": {"method": {"name": "cwt"}},
    "splitnn": {"method": {"name": "splitnn"}},
    "fedreplay": {"method": {"name": "fedreplay"}},
    "feder": {"method": {"name": "feder"}, "generator": DCGAN, "tuning": {"on": False}},
    "felicia": {"method": {"name": "felicia", "steps": 2, "learner_steps": 2}, "generator": DCGAN},
    "analytic": {"method": {"name": "analytic", "numbers": 8}, "model": ENCODER},
}
#: studies that no deployed site takes part in
SIMULATED_ONLY: dict[str, Tables] = {
    "centralized": {"method": {"name": "centralized"}},
    "fedavg-share": {"method": {"name": "fedavg-share"}},
    "fedavg, poisoned": {
        "method": {"name": "fedavg"},
        "poisoning": {"sites": ["site-1"], "attack": "scale", "factor": 2.0},
    },
}


def study_of(name: str) -> Study:
    """A study of two rounds, by its name in the tables above."""
    tables = {**BASE, **{**STUDIES, **SIMULATED_ONLY}[name]}
    return Study(**{**tables, "method": {"rounds": 2, **tables["method"]}})


def target(place: str) -> tuple[Any, str]:
    """The owner of a function, and its name there."""
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    *between, name = path.split(".")
    for one in between:
        owner = getattr(owner, one)
    return owner, name


@contextlib.contextmanager
def watched(places: dict[str, str], note: Callable[[str], None]) -> Iterator[None]:
    """While each of these functions is called, `note` is told its concern first; what it raises refuses."""
    with pytest.MonkeyPatch.context() as patch:
        for concern, place in places.items():
            owner, name = target(place)
            patch.setattr(owner, name, _noting(getattr(owner, name), concern, note))
        yield


def _noting(function: Callable[..., Any], concern: str, note: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*arguments: Any, **keywords: Any) -> Any:
        note(concern)
        return function(*arguments, **keywords)

    return noting


def approved() -> None:
    """The people of a site let the study run."""


def once(order: list[str]) -> list[str]:
    """An order without repetitions side by side, as of several parcels: of one concern, or of several in a row."""
    order, length = list(order), 1
    for place in range(len(order) - 1):
        if set(order[place : place + 2]) == set(AROUND):
            order[place : place + 2] = sorted(AROUND)
    while length <= len(order) // 2:
        for place in range(len(order) - 2 * length + 1):
            if order[place : place + length] == order[place + length : place + 2 * length]:
                del order[place : place + length]
                length = 0
                break
        length += 1
    return order


class Recorder:
    """The concerns that looked at each operation; every different order once."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}
        self.order: list[str] | None = None

    def note(self, concern: str) -> None:
        if self.order is not None:
            self.order.append(concern)

    @contextlib.contextmanager
    def operation(self, name: str) -> Iterator[None]:
        self.order = []
        try:
            yield
        finally:
            known, found = self.found.setdefault(name, []), " > ".join(once(self.order or []))
            if found not in known:
                known.append(found)
            self.order = None


def checks_of_sites(name: str, folder: Path, *, deployed: bool) -> dict[str, list[str]]:
    """The order of the sites' checks in a run, by operation."""
    recorder, handle = Recorder(), SiteHost.handle_group

    def handled(host: SiteHost, calls: Any) -> Any:
        with recorder.operation(calls[0].operation):
            answers = handle(host, calls)
            for refused in (answer for answer in answers if isinstance(answer, Exception)):
                recorder.note(f"refused: {type(refused).__name__}")
            return answers

    at_work = {concern: place for concern, place in CONCERNS.items() if concern not in OF_A_KIT}
    with pytest.MonkeyPatch.context() as patch, watched(at_work, recorder.note):
        patch.setattr(SiteHost, "handle_group", handled)
        if deployed:
            patch.setattr(Assembly, "_simulated_policy", lambda assembly: deployed_policy())
        with contextlib.suppress(WorkFailed):  # where all sites refuse a step, the run ends with it
            run(study_of(name), folder)
    return dict(sorted(recorder.found.items()))


def deployed_policy() -> Any:
    """The policy of a hospital that lets out what the studies above release."""
    from polyclinic.federation.ledger.kinds import KINDS
    from polyclinic.federation.policy import Policy

    kinds = tuple(kind for kind in KINDS.builtin if kind != "real-images")
    return Policy(kinds=kinds, deployed=True, min_cohort=1, few_images="allow", max_bytes=10**12)


class SiteWithKit:
    """One deployed site with a kit of its own, that has trained one round of FedAvg, and the call of the next one."""

    def __init__(self, folder: Path) -> None:
        study = study_of("fedavg")
        parts = prepare(study.data, study.sites)
        kit, self.name = folder / "kit", parts.names[0]
        (kit / "runs" / "run").mkdir(parents=True)
        self.suspensions, self.keys = Suspensions(kit), SeedKeys(1)
        assembly = Assembly(
            study, parts, kit / "runs" / "run", deployed_policy(), lambda name: open_site(parts.folder, name)
        )
        self.host = SiteHost(with_kit(assembly.host_spec(), self.name, kit, self.suspensions, self.keys))
        weights = Parcel("weights", assembly.initial_weights())
        self.host.handle(Call(self.name, "train", 1, {"weights": weights}))
        head = self.ledger.head
        anchor = sign_anchor(self.keys.signing_key(COORDINATOR), "run", self.name, head)
        self.call = Call(self.name, "train", 2, {"weights": weights}, anchor=anchor)

    @property
    def ledger(self) -> Any:
        return self.host.sites.ledgers[self.name]

    def state(self) -> dict[str, Any]:
        return dict(self.host.sites.get(self.name).state)


def with_kit(spec: Any, name: str, kit: Path, suspensions: Any, keys: Any) -> Any:
    """A host's spec with what a site's people have."""
    people = sys.modules["recorded_checks"]  # where the recorder looks it up
    own = Kit(
        site=name,
        suspensions=suspensions,
        keys=keys,
        anchors=kit / "anchors",
        require_approval=lambda: people.approved(),
    )
    return replace(spec, kit=own)


def checks_with_a_kit(folder: Path) -> dict[str, Any]:
    """The order of the checks of a site with a kit, and what a refusal by each of them does: whether one that nobody
    foresaw suspends the study, and whether a line has been written by then."""
    order: list[str] = []
    site = SiteWithKit(folder / "order")
    with watched(CONCERNS, order.append):
        site.host.handle(site.call)
    found = once(order)
    return {
        "order": " > ".join(found),
        "refusals": {one: refusal_by(one, folder / one) for one in dict.fromkeys(found)},
    }


def refusal_by(concern: str, folder: Path) -> str:
    """What a refusal that may be told, and an error that nobody foresaw, do when they come from this concern."""
    told = []
    for error in (ParcelRejected("made up"), RuntimeError("made up")):
        site = SiteWithKit(folder / type(error).__name__)
        before, lines, order = site.state(), site.ledger.position.lines, []

        def refuse(one: str, order: list[str] = order, error: Exception = error) -> None:
            order.append(one)
            if one == concern:
                raise error

        with watched(CONCERNS, refuse):
            [answer] = site.host.handle_group([site.call])
        assert answer is error, concern
        assert order.index(concern) == len(order) - 1, concern  # nothing looks at it any more
        after = site.host.sites.get(site.name).state
        assert {name: id(one) for name, one in after.items()} == {name: id(one) for name, one in before.items()}
        left = "a line was written" if site.ledger.position.lines > lines else "nothing left"
        stopped = "suspends" if site.suspensions.all() else "goes on"
        told.append(f"{type(error).__name__}: {left}, {stopped}")
    return "; ".join(told)


def checks_of_coordinator(name: str, folder: Path) -> list[str]:
    """The order of the coordinator's checks of a reply, in a run."""
    from polyclinic.federation.federation import Federation

    recorder, checked = Recorder(), Federation._checked

    def check(*arguments: Any) -> Any:
        with recorder.operation("reply"):
            return checked(*arguments)

    with pytest.MonkeyPatch.context() as patch, watched(OF_REPLIES, recorder.note):
        patch.setattr(Federation, "_checked", check)
        run(study_of(name), folder)
    return recorder.found["reply"]


def everything(folder: Path) -> dict[str, Any]:
    """What `order_of_checks.json` holds."""
    names = {"simulated": [*STUDIES, *SIMULATED_ONLY], "deployed": list(STUDIES)}
    sites = {
        kind: {
            name: checks_of_sites(name, folder / f"{kind} {number}", deployed=kind == "deployed")
            for number, name in enumerate(of_kind)
        }
        for kind, of_kind in names.items()
    }
    replies = {name: checks_of_coordinator(name, folder / f"replies {name}") for name in REPLIES}
    return {**sites, "with a kit": checks_with_a_kit(folder / "kit"), "coordinator": replies}


#: studies whose replies are looked at
REPLIES = ("fedavg", "fedavg, secure sum", "fedavg, whole numbers")

if __name__ == "__main__" and "--write" in sys.argv:
    sys.modules["recorded_checks"] = sys.modules["__main__"]
    with tempfile.TemporaryDirectory() as place:
        RECORDED.write_text(json.dumps(everything(Path(place)), indent=1) + "\n", encoding="utf-8")
