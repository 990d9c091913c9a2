"""What the people of a hospital see and decide, by command (`polyclinic site`) or on a page (`serve --kit`)."""

from __future__ import annotations

from pathlib import Path

from polyclinic.data.own_images import only_site_plugins
from polyclinic.deployment.approval import Approvals
from polyclinic.deployment.processes import Participant
from polyclinic.deployment.site_config import policy_of
from polyclinic.deployment.study_in_words import Asked
from polyclinic.errors import BadInput
from polyclinic.federation.layers.stopped import Suspensions
from polyclinic.study import parse_study


def approvals_of(kit: Path) -> Approvals:
    """What was decided at the site whose kit this is."""
    participant = Participant.of(kit)
    if participant.name == "server":
        raise BadInput(f"--kit {kit}: is the server's kit; name that of a site")
    return Approvals(participant.kit, participant.name)


def standing(approvals: Approvals, run: str) -> str:
    """Where a study stands, in one or two sentences."""
    words = {"waiting": "It waits for your decision.", "approved": "It is approved.", "refused": "It was refused."}
    told = words.get(approvals.state(run), "Its approval was revoked.")
    if wider := approvals.new_in_policy(run):
        told += f" Your policy lets out more than when you approved it: {'; '.join(wider)}."
    for one in Suspensions(approvals.kit).all():
        if one.study == run:
            told += (
                f" It was suspended on {one.since}: {one.reason}. The coordinator was not told this reason, as it may "
                "depend on your images. Look into it before you approve the study again."
            )
    return told


def describe(approvals: Approvals, run: str) -> list[str]:
    """What a study asks of this site, in plain sentences."""
    request = approvals.named(run)
    last = approvals.last_approved(but=run)
    policy = policy_of(approvals.policy_file)
    with only_site_plugins(approvals.kit / "runs" / run):
        asked = Asked(parse_study(request.study), approvals.site, approvals.kit, policy)
        return [
            f"Study '{run}', which came on {request.since}. {standing(approvals, run)}",
            *asked.sentences(last.study if last else None),
        ]
