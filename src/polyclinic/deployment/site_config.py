"""Settings of a deployed site, in the folder `local` of its kit: where its images are, and what may leave.

site.toml     [datasets.NAME]: where the images are that the coordinator knows as NAME
policy.toml   what the site lets out, whatever the coordinator asks
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from polyclinic.data.own_images import read_toml
from polyclinic.errors import BadInput
from polyclinic.federation.policy import Policy
from polyclinic.settings import sentences

#: parcels of metrics that a site lets out over all its runs, where its policy does not say how many
MAX_SCORES = 1000


def policy_of(file: Path) -> Policy:
    """The policy in a site's file. `deployed` is what every such site is, and no setting; the table [approve] holds
    rules about studies, for `approval_rules`."""
    tables = {name: value for name, value in read_toml(file).items() if name != "approve"}
    if "deployed" in tables:
        raise BadInput(f"{file}: 'deployed' is not a setting; take it out")
    try:
        return Policy(**{"max_scores": MAX_SCORES, **tables}, deployed=True)
    except ValidationError as error:
        raise BadInput(f"{file}: {sentences(error, '', Policy)}") from None
