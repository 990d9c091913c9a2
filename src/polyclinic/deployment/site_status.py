"""What the people of a hospital see, by command (`polyclinic site`) or on a page (`serve --kit`): studies that came,
what runs, what has left, and what is left of the budgets; and how the site leaves, or distrusts another."""

import contextlib
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tomli_w

from polyclinic.data.own_images import only_site_plugins, own_data
from polyclinic.data.source import AtSites
from polyclinic.deployment.approval import Approvals
from polyclinic.deployment.approval_rules import policy_of
from polyclinic.deployment.confirmation import KEYS_HEAD, confirmation_of, sign_kit
from polyclinic.deployment.joining import NEXT
from polyclinic.deployment.kits import SCRATCH
from polyclinic.deployment.processes import LEFT, Participant, process_of
from polyclinic.deployment.study_in_words import Asked
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.budget import OverBudget, Price, Spent, price_at
from polyclinic.federation.ledger.keys import PRIVATE_FILE, PUBLIC_FILE, SIGNING_FILE, KitKeys
from polyclinic.federation.ledger.ledger import LedgerBroken, verify
from polyclinic.federation.policy import Policy
from polyclinic.files import PARTIAL, atomic_write, lock
from polyclinic.json_types import JsonObject
from polyclinic.study import load_run_study, parse_study


@dataclass(frozen=True)
class RunStatus:
    """One run of a site: whether a process works on it now, and its ledger."""

    name: str
    at_work: bool
    lines: list[JsonObject]
    epsilon: float

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        sizes: Counter[str] = Counter()
        for line in self.lines:
            sizes[line["kind"]] += line["bytes"]
        return dict(sorted(sizes.items()))


def runs_of(kit: Path, site: str, policy: Policy) -> list[RunStatus]:
    """The runs of a site, by name; epsilon as its budget counts it, at its own delta."""
    return [run_of(kit, site, policy, folder) for folder in run_folders(kit)]


def run_folders(kit: Path) -> list[Path]:
    return sorted(path for path in (kit / "runs").glob("*") if path.is_dir())


def run_of(kit: Path, site: str, policy: Policy, folder: Path) -> RunStatus:
    """One run of a site; WorkFailed if its ledger does not hold."""
    try:  # of a run at work, a line that is half written is left out
        files = sorted((folder / "ledger").glob("*.jsonl"))
        lines = [line for file in files for line in verify(file, torn=True)]
    except LedgerBroken as error:
        raise WorkFailed(f"the ledger of run '{folder.name}' does not hold: {error}") from None
    spent, price = Spent(), None
    for line in lines:
        record = line["privacy"]
        if record is not None and price is None:
            price = _price(kit, site, policy, folder)
        try:
            cost = price(record) if price and record is not None else 0.0
        except OverBudget as error:
            raise BadInput(f"{kit / 'local' / 'policy.toml'}: epsilon cannot be counted: {error}") from None
        spent.add(line["kind"], line["bytes"], record, cost)
    held, at_work = kit / "runs" / f".{folder.name}.lock", False
    try:
        with lock(held, wait=0) if held.exists() else contextlib.nullcontext():
            pass
    except TimeoutError:
        at_work = True
    return RunStatus(folder.name, at_work, lines, spent.epsilon)


def _price(kit: Path, site: str, policy: Policy, folder: Path) -> Price:
    """What a record costs at this site: that depends on how many training images it has."""
    with only_site_plugins(folder):
        data = load_run_study(folder).data
    assert isinstance(data, AtSites)
    return price_at(policy, own_data(kit / "local" / "site.toml", data, site, kit / "cache").train)


@dataclass(frozen=True)
class Used:
    """What all runs together have used of one budget; `most` is None where the policy sets no limit."""

    what: str
    used: float
    most: float | None
    setting: str

    @property
    def sentence(self) -> str:
        used, most = self.used, self.most
        told = f"{self.what}: {used:,.4g} used" if isinstance(used, float) else f"{self.what}: {used:,} used"
        if most is None:
            return f"{told}; there is no limit ({self.setting} in policy.toml)"
        left = max(0, most - used)
        told_left = f"{left:.4g}" if isinstance(left, float) else f"{left:,}"
        return f"{told} of {most:,}, {told_left} left ({self.setting})"


def budgets(policy: Policy, runs: list[RunStatus]) -> list[Used]:
    """What all runs together have used of each budget."""
    size = sum(line["bytes"] for run in runs for line in run.lines)
    scores = sum(line["kind"] == "metrics" for run in runs for line in run.lines)
    epsilon = sum(run.epsilon for run in runs)
    return [
        Used("bytes", size, policy.max_bytes, "max_bytes"),
        Used("epsilon", epsilon, policy.max_epsilon, "max_epsilon"),
        Used("scores", scores, policy.max_scores, "max_scores"),
    ]


def approvals_of(kit: Path) -> Approvals:
    """What was decided at the site whose kit this is."""
    participant = Participant.of(kit)
    if participant.name == "server":
        raise BadInput(f"--kit {kit}: is the server's kit; name that of a site")
    return Approvals(participant.kit, participant.name)


def who_takes_part(kit: Path) -> str:
    """What the people of a kit have confirmed, or why it does not work, in a sentence."""
    try:
        found = confirmation_of(kit)
    except BadInput as error:
        return f"it takes part in nothing: {error}"
    names = ", ".join(sorted(found.roster.sites))
    if found.rehearsal:
        return f"a rehearsal of {names}: one hand has drawn the keys of all, so they protect nothing from it"
    return f"{found.by} confirmed on {found.at} that these take part: {names}"


def is_finished(kit: Path, run: str) -> bool:
    """Whether the finished model of a study lies in the kit."""
    return (kit / "runs" / run / "model.safetensors").is_file()


def standing(approvals: Approvals, run: str) -> str:
    """Where a study stands, in one or two sentences."""
    words = {"waiting": "It waits for your decision.", "approved": "It is approved.", "refused": "It was refused."}
    state = approvals.state(run)
    told = words.get(state, "Its approval was revoked.")
    if state == "approved" and (by := [one for one in approvals.decisions(run) if one.decision == "approve"]):
        told = f"It was approved by {by[-1].by} on {by[-1].at}."
        if is_finished(approvals.kit, run):
            told += f" It is finished: the model is in runs/{run}."
    if wider := approvals.new_in_policy(run):
        told += f" Your policy lets out more than when you approved it: {'; '.join(wider)}."
    for one in Suspensions(approvals.kit).all():
        if one.study == run:
            told += (
                f" It was suspended on {one.since}: {one.reason}. The coordinator was not told this reason, as it may "
                "depend on your images. Look into it before you approve the study again."
            )
    return told


class Described(NamedTuple):
    """A study as the site's people see it."""

    standing: str
    #: what leaves, what attacks have got out of such parcels, what bounds it
    short: list[str]
    #: what the site's policy will refuse, with the cure
    refused: list[str]
    sentences: list[str]

    @property
    def lines(self) -> list[str]:
        short = ["In short:", *(f"{number}. {one}" for number, one in enumerate(self.short, 1))]
        refused = [REFUSED, *(f"- {one}" for one in self.refused), ""] if self.refused else []
        return [self.standing, "", *short, "", *refused, *self.sentences]


REFUSED = "Your policy will refuse this study as it is (the coordinator does not see this list):"


def describe(approvals: Approvals, run: str) -> Described:
    """What a study asks of this site, in plain sentences."""
    request = approvals.named(run)
    last = approvals.last_approved(but=run)
    policy = policy_of(approvals.policy_file)
    with only_site_plugins(approvals.kit / "runs" / run):
        asked = Asked(parse_study(request.study), approvals.site, approvals.kit, policy)
        told = asked.sentences(last.study if last else None)
        came = f"Study '{run}', which came on {request.since}. {standing(approvals, run)}"
        return Described(came, asked.in_short(), list(map(str, asked.refused())), told)


# --- a site that leaves for good, and one that others no longer trust (new keys: joining.py) ------


def leave(kit: Path, site: str) -> list[Path]:
    """End everything that could act in the site's name; what was deleted.

    Every study is revoked or refused, with a line in the ledger, before the keys go. Ledgers, anchors, decisions,
    models and public keys stay: they are the site's proof of what left.
    """
    if process_of(kit):
        raise BadInput(f"site {site} is running; stop it (Ctrl-C, or your service manager) before it leaves")
    approvals = Approvals(kit, site)
    for request in approvals.requests():
        decided = approvals.decisions(request.run)
        if not decided or decided[-1].decision == "approve":
            approvals.decide(request.run, "revoke" if decided else "refuse", "the site leaves for good")
    atomic_write(kit / LEFT, f"site {site} left for good on {time.strftime('%Y-%m-%d %H:%M:%S')}\n", private=True)
    # what could act in the site's name, undo its noise, or hold its images
    keys = [kit / "startup" / "client.key", kit / "local" / PRIVATE_FILE, kit / "local" / SIGNING_FILE]
    unfinished = [*kit.glob(f"{SCRATCH}*"), *(kit / "local").glob(f"*{PARTIAL}")]  # of a `confirm` that was killed
    noise = sorted((kit / "runs").glob("*/sites/*/noise.key"))
    found = [path for path in (*keys, kit / NEXT, *unfinished, *noise, kit / "cache") if path.exists()]
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def distrust(kit: Path, other: str) -> None:
    """Seal nothing for another site any more. Its signing keys stay, so that its old ledgers can be verified, and it
    still counts among the confirmed sites: a secure sum needs as many sites as before."""
    confirmed, file = confirmation_of(kit), kit / "local" / PUBLIC_FILE
    tables = KitKeys(kit / "local").tables()
    if tables["sealing"].pop(other, None) is None:
        raise BadInput(f"{other}: {file} has no sealing key of this site; it lists {', '.join(tables['sealing'])}")
    atomic_write(file, KEYS_HEAD + tomli_w.dumps(tables), private=True, durable=True)
    sign_kit(kit / "local", confirmed.roster, rehearsal=confirmed.rehearsal)
