"""The web application of a hospital's kit, for its own people: it decides and says what `polyclinic site` does."""

import json
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import StringConstraints

from polyclinic import __version__
from polyclinic.deployment import site_status
from polyclinic.deployment.approval import Approvals, Request
from polyclinic.deployment.approval_rules import policy_of
from polyclinic.deployment.processes import process_of
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.kinds import DANGEROUS
from polyclinic.federation.ledger.ledger import LedgerBroken
from polyclinic.json_types import JsonObject
from polyclinic.report.serve.app import OPEN, Asked, bare_app
from polyclinic.report.serve.run_files import plain
from polyclinic.report.serve.server import Access, App, Guard

#: ledger lines that one search shows
MOST_LINES = 500
Text = Annotated[str, StringConstraints(max_length=1000)]


class Decided(Asked):
    """A decision of a person at the site about one study."""

    run: Text
    decision: Literal["approve", "refuse", "revoke"]
    why: Text = ""
    who: Text = ""


class Why(Asked):
    """The reason for stopping everything."""

    why: Text = ""


def site_app(kit: Path, access: Access) -> App:
    """The application, behind its guard."""
    app = bare_app("this site", "/site.js")
    view = SiteView(site_status.approvals_of(kit))
    app.get("/api/site")(view.site)
    app.get("/api/site/study")(view.study)
    app.get("/api/site/ledger")(view.ledger)
    app.post("/api/site/decide")(view.decide)
    app.post("/api/site/stop-all")(view.stop_all)
    return Guard(app, access, OPEN)


@dataclass(frozen=True)
class SiteView:
    """Answers to the page of a site. One question at a time: the plug-ins of a site are known while it is answered."""

    approvals: Approvals
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def site(self) -> Any:
        """State of the site: what waits, what runs, what left, what is left of its budgets."""
        with self._lock:
            runs, problems = self._runs()
            policy = policy_of(self.approvals.policy_file)
            status = {run.name: run for run in runs}
            studies = [self._study(one, status.get(one.run)) for one in reversed(self.approvals.requests())]
            known = {one["run"] for one in studies}
            content = {
                "site": self.approvals.site,
                "version": __version__,
                "running": process_of(self.approvals.kit) is not None,
                "studies": studies,
                "others": [_what_left(run) for run in runs if run.name not in known],
                "suspended": [asdict(one) for one in Suspensions(self.approvals.kit).all()],
                "budgets": [{**asdict(one), "sentence": one.sentence} for one in site_status.budgets(policy, runs)],
                "kinds": list(policy.kinds),
                "dangerous": [kind for kind in policy.kinds if kind in DANGEROUS],
                "problems": [*self.approvals.damaged(), *problems],
            }
            return plain(content)

    def study(self, run: Text) -> Any:
        """The requests of a study to the site, in plain sentences."""
        with self._lock:
            told = site_status.describe(self.approvals, run)._asdict()
            return {"run": run, **told, "decisions": self._decisions(run)}

    def decide(self, made: Decided) -> Any:
        """Approve, refuse or revoke: the same as the command of this name."""
        if made.decision == "approve" and not made.who.strip():
            raise BadInput("who: missing; write your name: it stands beside the approval")
        with self._lock:
            self.approvals.decide(made.run, made.decision, made.why, made.who)
            return {"run": made.run, "standing": site_status.standing(self.approvals, made.run)}

    def stop_all(self, made: Why) -> Any:
        """Take back every approval: nothing more leaves the site until its people approve a study again."""
        with self._lock:
            stopped, problems = self.approvals.stop_all(made.why)
            return {"stopped": stopped, "problems": problems}

    def ledger(self, text: Text = "", kind: Text = "", run: Text = "") -> Any:
        """Ledger lines of all runs, the newest run's last: those of a kind or run, and those that hold a text."""
        with self._lock:
            runs, _ = self._runs()
        every = [{"run": one.name, **line} for one in runs if run in ("", one.name) for line in one.lines]
        of_kind = [line for line in every if kind in ("", line["kind"])]
        found = [line for line in of_kind if text.lower() in json.dumps(line, ensure_ascii=False).lower()]
        size = sum(line["bytes"] for line in found)
        return plain({"lines": found[-MOST_LINES:], "found": len(found), "bytes": size, "of": len(every)})

    # --- behind them ------------------------------------------------------------------------------

    def _runs(self) -> tuple[list[site_status.RunStatus], list[str]]:
        """The runs of the site, and what is wrong with those whose ledger cannot be read."""
        policy, runs, problems = policy_of(self.approvals.policy_file), [], []
        for folder in site_status.run_folders(self.approvals.kit):
            try:
                runs.append(site_status.run_of(self.approvals.kit, self.approvals.site, policy, folder))
            except (WorkFailed, BadInput) as error:
                problems.append(str(error))
        return runs, problems

    def _study(self, request: Request, status: site_status.RunStatus | None) -> JsonObject:
        method = request.study["method"]
        return {
            "run": request.run,
            "since": request.since,
            "method": method["name"],
            "rounds": method["rounds"],
            "state": self.approvals.state(request.run),
            "standing": site_status.standing(self.approvals, request.run),
            "finished": site_status.is_finished(self.approvals.kit, request.run),
            "decisions": self._decisions(request.run),
            **(_what_left(status) if status else {"at_work": False, "left": []}),
        }

    def _decisions(self, run: str) -> list[JsonObject]:
        try:
            made = self.approvals.decisions(run)
        except (LedgerBroken, BadInput) as error:
            why = f"the ledger of decisions does not hold: {error}"
            return [{"decision": "revoke", "by": "", "at": "", "why": why}]
        return [{"decision": one.decision, "by": one.by, "at": one.at, "why": one.why} for one in made]


def _what_left(run: site_status.RunStatus) -> JsonObject:
    left = [
        {"kind": kind, "parcels": sum(line["kind"] == kind for line in run.lines), "bytes": size}
        for kind, size in run.bytes_by_kind.items()
    ]
    return {"run": run.name, "at_work": run.at_work, "left": left}
