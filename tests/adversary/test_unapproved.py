"""Attack: have a site work on a study that its people have not approved, or not like this, or no longer."""

import json
import os
from dataclasses import asdict

import pytest
import torch
from attacked_site import PRIVATE, SITE, ask, first_weights, study
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from polyclinic import __version__
from polyclinic.deployment import approval
from polyclinic.deployment.approval import Approvals, Decision, NameTaken, NotApproved, decision_digest
from polyclinic.deployment.approval_rules import policy_of
from polyclinic.deployment.deployed_site import ApprovedRelay, discreet
from polyclinic.deployment.site_status import runs_of
from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Suspended, pack, unpack
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.ledger import Ledger, verify
from polyclinic.privacy.epsilon import compute_epsilon


@pytest.fixture
def approvals(kit):
    kit.policy(approve="")
    return Approvals(kit.folder, SITE)


def test_nothing_is_opened_for_a_study_that_waits(kit, approvals):
    with pytest.raises(NotApproved, match=r"^waits for approval at the site$") as waits:
        kit.host()
    assert discreet(str(kit.folder))(waits.value) == "waits for approval at the site"
    assert not (kit.folder / "runs").exists()
    assert not (kit.folder / "cache").exists()
    assert [one.run for one in approvals.waiting()] == ["run"]


def test_an_approved_study_runs_and_another_of_its_name_does_not(kit, approvals):
    approvals.request("run", study(), __version__)
    approvals.decide("run", "approve")
    host = kit.host()
    assert ask(host, "train", weights=first_weights(host)).parcels
    approvals.request("other", study(), __version__)
    approvals.decide("other", "approve")
    for changed in ({"method__rounds": 4}, {"seed": 1}, {"optimizer__lr": 0.5}):
        with pytest.raises(NameTaken, match="another study of this name"):
            kit.host("other", **changed)


def test_what_was_shown_is_what_is_approved(kit, approvals):
    """A study cannot be exchanged between `site show` and `site approve`."""
    approvals.request("run", study(), __version__)
    seen = approvals.named("run")
    with pytest.raises(NameTaken):
        approvals.request("run", study(method__rounds=1000), __version__)
    assert approvals.named("run") == seen


@pytest.mark.parametrize(
    ("change", "waits"),
    [
        ({"min_cohort": 2}, False),
        ({"kinds": ["weights"]}, False),
        ({"max_bytes": 10**9}, False),
        ({"min_cohort": 0}, True),
        ({"kinds": ["weights", "latents"]}, True),
    ],
)
def test_a_wider_policy_waits_again_and_a_narrower_one_does_not(kit, approvals, change, waits):
    approvals.request("run", study(), __version__)
    approvals.decide("run", "approve")
    kit.policy(approve="", **change)
    if waits:
        with pytest.raises(NotApproved):
            kit.host()
        assert len(approvals.new_in_policy("run")) == 1
    else:
        assert kit.host()


def test_a_study_that_is_revoked_while_it_works_releases_nothing(kit, approvals, monkeypatch):
    approvals.request("run", study(), __version__)
    approvals.decide("run", "approve")
    host = kit.host()
    weights, train = first_weights(host), type(host.spec.method).train

    def train_slowly(self, site, **given):
        released = train(self, site, **given)
        approvals.decide("run", "revoke", "the data protection officer called")
        return released

    train_slowly.operation = train.operation
    monkeypatch.setattr(type(host.spec.method), "train", train_slowly)
    for _ in range(2):
        with pytest.raises(NotApproved, match="was revoked by the site's own people"):
            ask(host, "train", weights=weights)
    assert not (kit.folder / "runs" / "run" / "ledger" / "north.jsonl").exists()
    assert Suspensions(kit.folder).all() == []  # a person's decision tells nothing about images


def test_a_relay_starts_no_process_and_hands_out_no_answer_without_approval(kit, approvals):
    approvals.request("run", study(), __version__)
    relay = ApprovedRelay(SITE, lambda: pytest.fail("it was started"), str, lambda: approvals.require("run"))
    assert unpack(relay.handle("ping", pack({}, [])))[0] == {"site": SITE, "approval": "waiting"}
    for what in ("run", "wait", "take", "piece"):
        said = unpack(relay.handle(what, pack({"call": "1", "pieces": 0}, [b""])))[0]
        assert said["failed"] == "waits for approval at the site"
    approvals.decide("run", "refuse")
    assert unpack(relay.handle("ping", pack({}, [])))[0]["approval"] == "refused"


def test_no_rule_approves_what_a_person_refused_or_revoked(kit, approvals):
    approvals.request("run", study(), __version__)
    approvals.decide("run", "refuse")
    kit.policy(approve="every = true")
    with pytest.raises(NotApproved, match="was refused"):
        kit.host()
    approvals.decide("run", "approve")
    assert kit.host()
    approvals.decide("run", "revoke")
    with pytest.raises(NotApproved, match="was revoked"):
        kit.host()


@pytest.mark.parametrize("rule", ["same_as_last = true", 'methods = ["fedavg"]', "every = true"])
@pytest.mark.parametrize("decisions", [["approve", "revoke"], ["refuse"]])
def test_no_rule_approves_a_copy_of_what_a_person_refused_or_revoked(kit, approvals, rule, decisions):
    approvals.request("good", study(), __version__)
    approvals.decide("good", "approve")
    approvals.request("evil", study(method__rounds=5), __version__)
    for decision in decisions:
        approvals.decide("evil", decision)
    kit.policy(approve=rule)
    for name, seed in (("again", 0), ("another_seed", 1)):
        with pytest.raises(NotApproved, match="waits for approval"):
            kit.host(name, seed=seed, method__rounds=5)
    assert kit.host("good_again", seed=1)  # the rule still holds for other studies


@pytest.mark.parametrize(
    "change", [{"optimizer__lr": 0.051}, {"method__local_steps": 3}, {"seed": 4, "optimizer__batch_size": 9}]
)
def test_no_rule_approves_what_differs_from_a_refused_study_in_numbers_only(kit, approvals, change):
    approvals.request("evil", study(), __version__)
    approvals.decide("evil", "refuse")
    kit.policy(approve='methods = ["fedavg"]')
    with pytest.raises(NotApproved, match="waits for approval"):
        kit.host("evil2", **change)
    assert kit.host("other", model__backbone="small-cnn")  # another study, to which the rule applies
    approvals.decide("evil2", "approve")  # a person may
    assert kit.host("evil2", **change)


def test_a_study_has_a_longest_text(kit, approvals):
    classes = [f"class {number:06d}" for number in range(20_000)]
    with pytest.raises(NameTaken, match="longer than the 200000 characters"):
        kit.host("long", data__classes=classes)
    assert not (kit.folder / "approvals" / "long").exists()


def test_threads_are_those_that_were_approved_and_no_more_than_there_are_cores(kit, approvals):
    """Settings of the engine are no part of the digest that an approval is bound to."""
    kit.policy(approve="every = true")
    kit.host("run", engine__threads=1)
    kit.host("run", engine__threads=64)
    assert torch.get_num_threads() == 1
    kit.host("other", engine__threads=10_000)
    assert torch.get_num_threads() == os.cpu_count()
    torch.set_num_threads(1)


def test_a_rule_about_epsilon_approves_nothing_that_leaves_without_it(kit, approvals):
    kit.policy(approve='methods = ["fedavg", "fedavg+replay"]\nmax_epsilon = 4.0')
    private = {**PRIVATE, "noise_multiplier": 5.0, "target_epsilon": 4.0}
    replayed = {
        "data__size": 32,
        "replay": {"codes": "prior"},
        "generator": {"name": "dcgan", "discriminator_norm": "group", "spread": False, "labels": "even"},
    }
    with pytest.raises(NotApproved, match="waits for approval"):
        kit.host("generator", privacy={**private, "on": ["generator"]}, **replayed)
    with pytest.raises(NotApproved, match="waits for approval"):
        kit.host("scores", privacy=private)
    assert kit.host("covered", privacy={**private, "cover": "all"}, evaluation={"every": 0, "final": "none"})


def test_a_policy_that_cannot_be_read_approves_nothing_and_hinders_no_revocation(kit, approvals):
    approvals.request("run", study(), __version__)
    approvals.decide("run", "approve")
    (kit.folder / "local" / "policy.toml").write_text("kinds = [")
    with pytest.raises(NotApproved):
        approvals.require("run")
    approvals.decide("run", "revoke")
    with pytest.raises(NotApproved, match="was revoked"):
        approvals.require("run")


def test_every_decision_is_in_the_ledger(kit, approvals):
    approvals.request("run", study(), __version__)
    for decision in ("refuse", "approve", "revoke"):
        approvals.decide("run", decision, why="because")
    lines = verify(approvals.ledger_file("run"))
    assert [(line["operation"], line["kind"], line["bytes"]) for line in lines] == [
        ("refuse", "approval", 0),
        ("approve", "approval", 0),
        ("revoke", "approval", 0),
    ]
    kept = [json.loads(line) for line in (approvals.folder / "run" / "decisions.jsonl").read_text().splitlines()]
    assert [decision_digest(one) for one in kept] == [line["digest"] for line in lines]


def test_a_coordinator_cannot_fill_the_disk_with_studies(kit, approvals, monkeypatch):
    monkeypatch.setattr(approval, "MOST_WAITING", 2)
    for name in ("a", "b"):
        approvals.request(name, study(), __version__)
    with pytest.raises(NameTaken, match="2 studies wait at this site already"):
        approvals.request("c", study(), __version__)
    approvals.decide("a", "refuse")
    approvals.request("c", study(), __version__)


def test_approving_a_suspended_study_releases_it(kit, approvals):
    approvals.request("run", study(), __version__)
    approvals.decide("run", "approve")
    host = kit.host()
    Suspensions(kit.folder).suspend("run", "GateRefusedData: tensor 'x' holds NaN")
    approvals.decide("run", "approve", "one broken scan, taken out")
    assert ask(host, "train", weights=first_weights(host)).parcels


@pytest.mark.parametrize("decision", ["approve", "revoke"])
def test_a_decision_about_a_suspended_study_frees_the_sites_other_studies(kit, approvals, decision):
    for name, seed in (("evil", 0), ("good", 5)):
        approvals.request(name, study(seed=seed), __version__)
        approvals.decide(name, "approve")
    host = kit.host("good", seed=5)
    Suspensions(kit.folder).suspend("evil", "GateRefusedData: tensor 'x' holds NaN")
    with pytest.raises(Suspended):
        ask(host, "train", weights=first_weights(host))
    approvals.decide("evil", decision)
    assert ask(host, "train", weights=first_weights(host)).parcels


def test_a_decision_that_is_not_in_the_ledger_is_void(kit, approvals):
    approvals.request("run", study(), __version__)
    policy = policy_of(approvals.policy_file).model_dump(mode="json")
    forged = asdict(Decision("approve", "nobody", "2026-01-01 00:00:00", approvals.named("run").digest, policy))
    file = approvals.folder / "run" / "decisions.jsonl"
    file.write_text(json.dumps(forged) + "\n")
    with pytest.raises(NotApproved, match="waits for approval"):
        kit.host()
    Ledger(approvals.ledger_file("run"), Ed25519PrivateKey.generate()).append(
        round=0, operation="approve", kind="approval", bytes=0, digest=decision_digest(forged), to=SITE
    )
    with pytest.raises(NotApproved, match="was revoked"):  # signed, but not by the site
        kit.host()
    approvals.ledger_file("run").unlink()
    approvals.decide("run", "approve")
    assert kit.host()


def test_a_revocation_stays_though_its_text_or_its_line_is_taken_away(kit, approvals):
    approvals.request("run", study(), __version__)
    approvals.decide("run", "approve")
    file, ledger = approvals.folder / "run" / "decisions.jsonl", approvals.ledger_file("run")
    before = file.read_text(), ledger.read_text()
    approvals.decide("run", "revoke")
    file.write_text(before[0])
    with pytest.raises(NotApproved, match="was revoked"):
        kit.host()
    ledger.write_text(before[1])  # the anchor knows of one line more
    with pytest.raises(NotApproved, match="was revoked"):
        kit.host()
    with pytest.raises(WorkFailed, match=r"the study does not run: .* line 2: is missing"):
        approvals.decide("run", "approve")


def test_status_counts_epsilon_as_the_gate_does(kit):
    """At the delta that its policy has now, whatever delta is on record."""
    host = kit.host(privacy=PRIVATE)
    ask(host, "train", weights=first_weights(host))
    kit.policy(max_delta=1e-6)
    policy = policy_of(kit.folder / "local" / "policy.toml")
    [run] = runs_of(kit.folder, SITE, policy)
    [line] = run.lines
    steps, rate = line["privacy"]["mechanisms"][0]["steps"], line["privacy"]["mechanisms"][0]["sampling_rate"]
    assert run.epsilon == pytest.approx(compute_epsilon(rate, 1.0, steps, 1e-6))
    assert run.epsilon > line["privacy"]["epsilon"]


def test_the_study_that_was_approved_last_is_known_where_the_clock_went_back(kit, approvals, monkeypatch):
    for run, rounds, year in (("long_ago", 5, 2031), ("now", 7, 2026)):
        approvals.request(run, study(method__rounds=rounds), __version__)
        monkeypatch.setattr(approval, "_now", lambda year=year: f"{year}-01-01 00:00:00")
        approvals.decide(run, "approve")
    assert approvals.last_approved().run == "now"
    approvals.decide("now", "revoke")
    assert approvals.last_approved().run == "long_ago"
