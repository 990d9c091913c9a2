"""The released model, which is that of the best round: who was trained on? Asked for each site that the audit attacks.

Sites keep the first and the last release of each operation. The model that a run releases may be of a round in between
(`evaluation.select`); everybody gets it, so membership is asked of it as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from polyclinic.audits.parcels import AuditedParcel
from polyclinic.audits.views import Seen, Tools, Truth
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.runner.run.assembly import Assembly

MEMBERSHIP = ("loss-threshold", "reference-models")


@dataclass(frozen=True)
class ReleasedModel(AuditedParcel):
    """The model of a run, asked about the images of one site."""

    file: Path = Path()
    round: int = 0
    of_site: str = ""
    parts: dict[str, Any] = field(default_factory=dict)
    number: int = 0

    @property
    def site(self) -> str:
        return self.of_site

    @property
    def release(self) -> Any:
        return SimpleNamespace(name=f"released-{self.round:05d}", round=self.round, operation="released model")

    @cached_property
    def parcel(self) -> Parcel:
        return Parcel("weights", load_file(self.file), {})

    @property
    def kind_that_left(self) -> str:
        return "weights"

    @property
    def who(self) -> str:
        return self.of_site

    @property
    def name(self) -> str:
        return f"{self.of_site}, the released model (round {self.round})"

    @property
    def attacks(self) -> tuple[str, ...]:
        return MEMBERSHIP

    def seen(self, tools: Tools) -> Seen:
        return Seen(self.of_site, self.parcel, (self.parcel,), lambda kind: {}, max(1, self.round), 0, tools)

    def truth(self, tools: Tools) -> Truth:
        return Truth([], tools.site_data(self.of_site), tools.seed)


def released_models(folder: Path, assembly: Assembly, chosen: Sequence[AuditedParcel]) -> list[ReleasedModel]:
    """The released model for each site whose weights are attacked; none where it is of a round that is attacked anyway,
    or where the run has none (a deployed site, an unfinished run)."""
    asked = [one for one in chosen if one.parcel.kind == "weights" and len(one.parts) == 1]
    file, best = folder / "model.safetensors", best_round(folder)
    if not asked or best is None or not file.is_file() or assembly.open_data is not None:
        return []
    if best in {one.release.round for one in asked}:
        return []  # what its sites sent in that round is attacked, which tells more
    try:
        load_file(file)
    except (OSError, SafetensorError):
        return []
    sites = dict.fromkeys(one.site for one in asked)
    return [ReleasedModel(file=file, round=best, of_site=site) for site in sites]


def best_round(folder: Path) -> int | None:
    """The round of the released model, as the result says."""
    try:
        found = json.loads((folder / "result.json").read_text(encoding="utf-8"))["selected"]["round"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) and found > 0 else None
