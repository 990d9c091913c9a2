"""Approval: at a deployed site a study waits until a person there has seen it, or a rule of the site approves it.

KIT/approvals/RUN/request.json       the study as it came, under the coordinator's name for its run
KIT/approvals/RUN/decisions.jsonl    what was decided, by whom, about which study and which policy
KIT/approvals/RUN/ledger/SITE.jsonl  a signed line for every decision, with its digest; without it a decision is void
KIT/approvals/RUN/stopped            the study was stopped: written first, and nothing else is read for it

A study whose request.json is damaged counts as stopped.

An approval is for one study and for the policy that the site had then. Another study under the same name is refused;
if the policy lets out more than before, the study waits again.
"""

import contextlib
import getpass
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from polyclinic.data.allowed_paths import folder_name
from polyclinic.deployment.approval_rules import (
    BY_RULE,
    NOT_ABOUT_IMAGES,
    NameTaken,
    changed_settings,
    differ_in_numbers_only,
    policy_of,
    refuse_odd_text,
    rules_of,
    trusted_tensors,
    widened,
)
from polyclinic.errors import BadInput, Damaged, WorkFailed
from polyclinic.federation.call import Suspended
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.keys import KitKeys
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger, LedgerBroken, verify
from polyclinic.files import atomic_write, digest_of, lock, read_json
from polyclinic.json_types import JsonObject
from polyclinic.models import PUBLIC, RANDOM
from polyclinic.runner.run.assembly import trusted_file
from polyclinic.study import Study

FOLDER = "approvals"
#: in a kit: files of first weights that the site's people trust
TRUSTED_WEIGHTS = Path("local") / "weights"
#: studies that may wait at once, and characters that each may have: a coordinator must not fill a site's disk
MOST_WAITING = 50
LONGEST = 200_000

State = Literal["waiting", "approved", "refused", "revoked"]
#: what the coordinator hears, always in these words
TOLD: dict[str, str] = {
    "waiting": "waits for approval at the site",
    "refused": "was refused by the site's own people",
    "revoked": "was revoked by the site's own people",
}
NO_DECISION = "nothing can be decided, and the study does not run"


class NotApproved(Suspended):
    """The site does nothing for this study. The message is one of `TOLD`, and may be told to the coordinator."""

    def __init__(self, state: State) -> None:
        super().__init__(TOLD[state])
        self.state = state


@dataclass(frozen=True)
class Request:
    """A study that came to the site, and what the coordinator calls its run. `since` is local time."""

    run: str
    study: JsonObject
    digest: str
    version: str
    since: str


@dataclass(frozen=True)
class Decision:
    """What a person, or a rule (`by` then names it), decided about a study under a policy. `at` is local time."""

    decision: Literal["approve", "refuse", "revoke"]
    by: str
    at: str
    study: str
    policy: JsonObject
    why: str = ""
    #: an approval's place among those of the site, from 1: a clock may go back. An older version wrote none
    number: int = 0


class Approvals:
    """The studies that came to one site, and what was decided about each."""

    def __init__(self, kit: Path, site: str) -> None:
        self.kit, self.site = kit, site
        self.folder = kit / FOLDER
        self.policy_file = kit / "local" / "policy.toml"

    # --- what came --------------------------------------------------------------------------------

    def request(self, run: str, study: Study, version: str) -> Request:
        """Note a study that came; BadInput if another study came under this name before."""
        run, tables = folder_name(run), study.as_tables()
        digest = study_digest(tables)
        if len(json.dumps(tables, default=str)) > LONGEST:
            raise NameTaken(f"the study is longer than the {LONGEST} characters that a site takes; shorten it")
        refuse_odd_text(tables, names=(run, *study.sites.site_names()))
        with self._locked():
            if (known := self.find(run)) is not None:
                if known.digest != digest:
                    raise NameTaken(f"--name {run}: another study of this name came to this site; take another name")
                return known
            if sum(self.state(one.run) == "waiting" for one in self.requests()) >= MOST_WAITING:
                raise NameTaken(f"{MOST_WAITING} studies wait at this site already; wait until its people have decided")
            found = Request(run, tables, digest, version, _now())
            (self.folder / run).mkdir(mode=0o700, parents=True, exist_ok=True)
            content = json.dumps(asdict(found), indent=1) + "\n"
            atomic_write(self.folder / run / "request.json", content, private=True, durable=True)
            return found

    def find(self, run: str) -> Request | None:
        """The study that came under this name; Damaged if that cannot be read any more."""
        file = self.folder / folder_name(run) / "request.json"
        return _read_request(file) if file.exists() else None

    def named(self, run: str) -> Request:
        """The same; BadInput if there is none."""
        if (request := self.find(run)) is None:
            raise BadInput(f"{run}: no study of this name came to this site; `polyclinic site pending` lists them")
        return request

    def requests(self) -> list[Request]:
        """All studies that came, the earliest first, but for those in `damaged`."""
        found = []
        for file in self.folder.glob("*/request.json"):
            with contextlib.suppress(Damaged):
                found.append(_read_request(file))
        return sorted(found, key=lambda one: (one.since, one.run))

    def damaged(self) -> list[str]:
        """The studies whose requests cannot be read any more, a sentence each."""
        told = []
        for file in sorted(self.folder.glob("*/request.json")):
            try:
                _read_request(file)
            except Damaged:
                cure = "bring it back from a copy, or have it sent under another name"
                told.append(f"{file.parent.name}: its request.json is damaged; the study counts as stopped. {cure}")
        return told

    # --- what was decided -------------------------------------------------------------------------

    def decisions(self, run: str) -> list[Decision]:
        """What was decided about a run, the first decision first, as its ledger says; LedgerBroken if it does not hold.

        A decision that is in the ledger alone is one about no study: it can stop one, and approve none."""
        file = self.folder / run / "decisions.jsonl"
        written = {}
        for text in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # a damaged text decides nothing
                made = json.loads(text)
                written[decision_digest(made)] = Decision(**made)
        lines = self._ledger_lines(run)
        return [written.get(line["digest"], Decision(line["operation"], "", "", "", {})) for line in lines]

    def _last(self, run: str) -> Decision | None:
        """What was decided last; a revocation where the ledger does not hold, or the study was stopped otherwise."""
        try:
            last = next(reversed(self.decisions(run)), None)
        except (LedgerBroken, BadInput):
            return Decision("revoke", "", "", "", {})
        if self._mark(run).exists() and (last is None or last.decision == "approve"):
            return Decision("revoke", "", "", "", {})
        return last

    def _ledger_lines(self, run: str) -> list[JsonObject]:
        file, keys = self.ledger_file(run), KitKeys(self.kit / "local").verifying_keys(self.site)
        lines = verify(file, keys, torn=True) if file.exists() else []
        self._anchor(run).check(file, [line["digest_of_line"] for line in lines])
        return lines

    def _anchor(self, run: str) -> AnchorFile:
        return AnchorFile(self.kit / "anchors" / "approvals" / f"{run}.json")

    def state(self, run: str) -> State:
        """Where a study stands, as the files say: the rules are not asked."""
        try:
            request, last = self.named(run), self._last(run)
        except Damaged:
            return "revoked"
        if last is None:
            return "waiting"
        if last.decision != "approve":
            return "refused" if last.decision == "refuse" else "revoked"
        same = request.digest == last.study
        return "approved" if same and not self.new_in_policy(run) else "waiting"

    def new_in_policy(self, run: str) -> list[str]:
        """What the site's policy lets out now and did not when the study was approved, in sentences."""
        try:
            approved = [one for one in self.decisions(run) if one.decision == "approve"]
        except LedgerBroken:  # no approval holds
            return []
        return widened(approved[-1].policy, policy_of(self.policy_file)) if approved else []

    def last_approved(self, but: str = "") -> Request | None:
        """The study that was approved last, among those of other runs whose approval was not taken back."""
        decided = [(self._last(request.run), request) for request in self.requests() if request.run != but]
        found = [((last.number, last.at), request) for last, request in decided if last and last.decision == "approve"]
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def stopped_before(self, request: Request) -> str | None:
        """The run of a study that a person refused or revoked, and from which this one differs in numbers at most; None
        if a person has approved this very study, whatever its seed."""
        if damaged := self.damaged():  # nobody knows what it was
            return damaged[0]
        decided = [(self._last(other.run), other) for other in self.requests()]
        for last, other in decided:
            by_person = last and last.decision == "approve" and not last.by.startswith(BY_RULE)
            if by_person and not changed_settings(other.study, request.study, but=("seed",)):
                return None
        for last, other in decided:
            if last and last.decision != "approve" and differ_in_numbers_only(other.study, request.study):
                return other.run
        return None

    def begins_with_unknown_weights(self, request: Request) -> bool:
        """Whether a study begins with weights from a file that the site's people have not put among those they trust:
        whoever chose them may have crafted them, and no rule approves that. The same of a second model."""
        model, method = request.study.get("model", {}), request.study.get("method", {})
        trusted = self.kit / TRUSTED_WEIGHTS
        second = method.get("against") or method.get("against_digest")
        if second and trusted_tensors(trusted, method.get("against_digest")) is None:
            return True
        if model.get("weights", RANDOM) in (RANDOM, PUBLIC):
            return False
        return trusted_file(trusted, model.get("weights_sha256")) is None

    def decide(self, run: str, decision: Literal["approve", "refuse", "revoke"], why: str = "", who: str = "") -> None:
        """A person at the site decides; BadInput if there is nothing to decide. Each decision ends a suspension, for
        which the site's other studies wait, too. To stop is done first, and what else is to be done after it. `who` is
        the person's name, which is written down beside the user of this machine."""
        if who.startswith(BY_RULE) or not who.isprintable():
            raise BadInput(f"{who!a}: is no name of a person; write who decides")
        stops = decision != "approve"
        if not (self.folder / folder_name(run) / "request.json").exists():
            self.named(run)
        with self._locked():
            try:
                self.named(run)
                decided = self.decisions(run)
            except (LedgerBroken, BadInput) as error:
                if stops:
                    self._stop(run)
                told = "is stopped, and its ledger cannot say so" if stops else NO_DECISION
                raise WorkFailed(f"{run}: {told}: {error}") from None
            was_approved = bool(decided) and decided[-1].decision == "approve"
            if decision == "refuse" and was_approved:
                raise BadInput(f"{run}: was approved; `polyclinic site revoke {run}` takes the approval back")
            if decision == "revoke" and not was_approved:
                raise BadInput(f"{run}: is not approved; `polyclinic site show {run}` says where it stands")
            if stops:
                self._stop(run)
            user = getpass.getuser()
            self._write(run, decision, f"{who.strip()} ({user})" if who.strip() else user, why)
            if not stops:
                self._mark(run).unlink(missing_ok=True)
        Suspensions(self.kit).release(run)

    def stop_all(self, why: str) -> tuple[list[str], list[str]]:
        """Take every approval back; the runs that were stopped, and what went wrong beside that. What cannot be read
        may have been approved, and is stopped, too."""

        def may_run(run: str) -> bool:
            try:
                last = next(reversed(self.decisions(run)), None)
                return last is not None and last.decision == "approve" and not self._mark(run).exists()
            except Exception:  # whatever is wrong with its files
                return True

        runs = [file.parent.name for file in sorted(self.folder.glob("*/request.json")) if may_run(file.parent.name)]
        problems = []
        for run in runs:
            self._stop(run)
        for run in runs:
            try:
                self.decide(run, "revoke", why)
            except (WorkFailed, BadInput, OSError) as error:
                problems.append(str(error))
        return runs, problems

    def _mark(self, run: str) -> Path:
        return self.folder / folder_name(run) / "stopped"

    def _stop(self, run: str) -> None:
        atomic_write(self._mark(run), _now() + "\n", private=True, durable=True)

    def require(self, run: str) -> None:
        """NotApproved unless the study may run now; a rule of the site may approve it here."""
        try:
            state = self._state_by_rules(run)
        except (BadInput, LedgerBroken):  # a policy that cannot be read, or a damaged anchor, allows nothing
            state = "waiting"
        if state != "approved":
            raise NotApproved(state)

    def _state_by_rules(self, run: str) -> State:
        if (state := self.state(run)) != "waiting":
            return state
        with self._locked():
            request, last = self.find(run), self.last_approved(but=run)
            if request is None or self.state(run) != "waiting":
                return self.state(run)
            if self.stopped_before(request) or self.begins_with_unknown_weights(request):
                return "waiting"
            before = [self._last(one.run) for one in self.requests()]
            today = sum(1 for one in before if one and one.by.startswith(BY_RULE) and one.at.startswith(_now()[:10]))
            rules = rules_of(self.policy_file)
            rule = rules.reason_to_approve(request.study, last.study if last else None, today)
            if rule is None:
                return "waiting"
            self._write(run, "approve", rule, "")
        return "approved"

    def _write(self, run: str, decision: Literal["approve", "refuse", "revoke"], by: str, why: str) -> None:
        """The ledger first: no decision counts that is not in it."""
        request = self.named(run)
        # a mistake in policy.toml must not keep a person from stopping a study
        policy = policy_of(self.policy_file).model_dump(mode="json") if decision == "approve" else {}
        # stopping depends on nothing else
        before = [self._last(one.run) for one in self.requests()] if decision == "approve" else []
        number = 1 + max((one.number for one in before if one), default=0) if decision == "approve" else 0
        made = asdict(Decision(decision, by, _now(), request.digest, policy, why, number))
        ledger = Ledger(self.ledger_file(run), KitKeys(self.kit / "local").signing_key(), self._anchor(run))
        digest = decision_digest(made)
        ledger.append(round=0, operation=decision, kind="approval", bytes=0, digest=digest, to=self.site, privacy=None)
        ledger.commit()
        file = self.folder / run / "decisions.jsonl"
        written = file.read_bytes().rstrip(b"\n") + b"\n" if file.exists() else b""
        atomic_write(file, written.lstrip(b"\n") + json.dumps(made).encode() + b"\n", private=True, durable=True)

    def ledger_file(self, run: str) -> Path:
        return self.folder / run / "ledger" / f"{self.site}.jsonl"

    def _locked(self) -> Any:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return lock(self.folder / ".lock")

    def waiting(self) -> Iterator[Request]:
        """The studies that wait for a person."""
        return (one for one in self.requests() if self.state(one.run) == "waiting")


def _read_request(file: Path) -> Request:
    """Damaged unless the file holds a study, and the one that its digest is of."""
    try:
        found = Request(**read_json(file))
        fits = study_digest(found.study) == found.digest and isinstance(found.since, str)
        fits = fits and found.run == file.parent.name
    except (TypeError, AttributeError):
        fits = False
    if not fits:
        raise Damaged(f"{file}: is damaged (it does not hold the study that came); bring it back from a copy")
    return found


def study_digest(tables: JsonObject) -> str:
    """What an approval is bound to: all settings but those of the engine, which say nothing about images."""
    return digest_of({name: table for name, table in tables.items() if name not in NOT_ABOUT_IMAGES})


def decision_digest(made: JsonObject) -> str:
    """What the ledger has of a decision."""
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
