"""What a claim is, and how the tables in `claims/` become claims.

A claim has a sentence of a paper with its numbers, a study with its arms, measures, and a rule written beforehand.
Changes of a study are written as on the command line (`method.name=cwt`); `@name` stands for a list of the file's
[settings], `group` for fields that claims of a file share, and `decides` for the claim whose reason is looked for.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from polyclinic.errors import BadInput, did_you_mean
from polyclinic_lab.rules import Rule, parse_rule

FOLDER = Path(__file__).parent / "claims"
#: one file a paper; experiments that look for reasons come last, as they name claims of the others
FILES = ("qu", "feder", "felicia", "gradients", "ours", "why")
Scale = Literal["quick", "full"]
SCALES: tuple[Scale, ...] = get_args(Scale)
Changes = tuple[str, ...]


@dataclass(frozen=True)
class Number:
    """A figure of the paper; `std` where the paper gives one."""

    label: str
    metric: str
    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Claim:
    """`common`, `scales` and `phantom` are changes for all arms: always, at a scale, and with phantoms for images.

    `arms_at`: changes of one arm at one scale, such as a number of steps that is larger at `full`.
    `minutes`: an estimate for the whole claim, by scale and `cpu` (two cores) or `gpu` (all runs one after another).
    """

    name: str
    paper: str
    place: str
    sentence: str
    paper_data: str
    our_data: str
    measure: tuple[str, ...]
    rule: Rule
    minutes: Mapping[Scale, Mapping[str, float]]
    file: Path
    study: str = ""  #: a file in `studies/`
    arms: Mapping[str, Changes] = field(default_factory=dict)
    numbers: tuple[Number, ...] = ()
    common: Changes = ()
    scales: Mapping[Scale, Changes] = field(default_factory=dict)
    phantom: Changes = ()
    arms_at: Mapping[Scale, Mapping[str, Changes]] = field(default_factory=dict)
    seeds: Mapping[Scale, int] = field(default_factory=lambda: {"quick": 3, "full": 3})
    first_seed: int = 0  #: above 0 where a rule was written after a result of other seeds
    axis: str = ""  #: what the labels are numbers of, where the figure is a curve
    post_hoc: bool = False  #: the rule was written when a result for it was known already
    decides: str = ""  #: the claim that did not hold, and whose reason this experiment looks for
    finding: str = ""  #: what the experiments that look for the reason have shown, where a claim has some
    tune: Changes = ()  #: values to choose from by cross-validation, as `polyclinic tune --over` takes them
    picture: str = ""  #: a picture in a run folder that the paper has, too: the first run's is copied beside the figure

    def changes(self, label: str, scale: Scale, *, phantom: bool) -> Changes:
        """All changes of the study for one arm; later ones stand above earlier ones."""
        drawn = self.phantom if phantom else ()
        own = self.arms_at.get(scale, {}).get(label, ())
        chosen = CHOSEN.get(tuned_name(self, label, scale), ()) if self.tune and not phantom else ()
        return (*self.common, *self.scales.get(scale, ()), *drawn, *self.arms[label], *own, *chosen)


#: what `polyclinic_lab.tuning` has chosen, by arm
TUNED = Path(__file__).parents[1] / "tuned.json"
CHOSEN: dict[str, list[str]] = json.loads(TUNED.read_text(encoding="utf-8")) if TUNED.exists() else {}


def tuned_name(claim: Claim, label: str, scale: Scale) -> str:
    """What settings are chosen for: a method (and the images it pools) on a study, whatever else an arm changes."""
    asked = [one for one in claim.arms[label] if one.startswith(("method.name=", "method.images="))]
    return " ".join((claim.study, scale, *asked))


class ClaimsFile:
    """One TOML file of claims, with the settings, arms and groups that they share."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.tables = tomllib.loads(file.read_text(encoding="utf-8"))

    def claims(self, known: Mapping[str, Claim]) -> dict[str, Claim]:
        """The known claims and those of the file, of which an experiment may be about an earlier one."""
        found = dict(known)
        for raw in self.tables["claim"]:
            found[raw["name"]] = self._claim(dict(raw), found)
        return found

    def _claim(self, raw: dict[str, Any], known: Mapping[str, Claim]) -> Claim:
        raw = {**self.tables.get("group", {}).get(raw.pop("group", ""), {}), **raw}
        fields = self._fields(raw) | {"file": self.file}
        if "decides" not in raw:
            return Claim(paper=self.tables["paper"], **fields)
        return _experiment(known[raw["decides"]], fields)

    def _fields(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The fields of a claim as a table has them."""
        found = {name: value.strip() if isinstance(value, str) else value for name, value in raw.items()}
        if "rule" in raw:
            words, provided = found.pop("rule"), found.pop("provided", "")
            found["rule"] = parse_rule(words, provided, found.pop("exact", ()), found.pop("unit", "seeds"))
        for name in {"common", "phantom", "measure", "tune"} & raw.keys():
            found[name] = self._changes(raw[name])
        found["scales"] = {scale: self._changes(found.pop(scale, ())) for scale in SCALES}
        if "arms" in raw:
            found["arms"] = self._arms(raw["arms"])
        if "arms_at" in raw:
            found["arms_at"] = {scale: self._arms(arms) for scale, arms in raw["arms_at"].items()}
        if "numbers" in raw:
            found["numbers"] = tuple(_numbers(raw["numbers"]))
        return found

    def _arms(self, told: Sequence[str] | Mapping[str, Sequence[str]]) -> dict[str, Changes]:
        """Arms by label; a list names arms that the file's claims share."""
        shared = self.tables.get("arms", {})
        arms = told if isinstance(told, Mapping) else {label: shared[label] for label in told}
        return {label: self._changes(changes) for label, changes in arms.items()}

    def _changes(self, told: Sequence[str]) -> Changes:
        settings = self.tables.get("settings", {})
        lists = [settings[one[1:]] if one.startswith("@") else [one] for one in told]
        return tuple(change for one in lists for change in one)


def _numbers(tables: Mapping[str, Mapping[str, Any]]) -> list[Number]:
    """Figures of the paper by metric and label: a mean, or a mean and a standard deviation."""
    return [
        Number(label, metric, *(value if isinstance(value, list) else [value]))
        for metric, values in tables.items()
        for label, value in values.items()
    ]


def _experiment(base: Claim, fields: dict[str, Any]) -> Claim:
    """The studies of a claim that did not hold, with further changes of all arms, or other arms, and its own rule."""
    scales = {scale: (*base.scales.get(scale, ()), *fields["scales"][scale]) for scale in SCALES}
    common = (*base.common, *fields.pop("common", ()))
    own: dict[str, Any] = {"numbers": (), "arms_at": {}, "axis": "", "post_hoc": False, "finding": "", "picture": ""}
    return replace(base, **own | fields | {"place": f"{base.place}: why?", "common": common, "scales": scales})


def read_claims() -> dict[str, Claim]:
    """All claims by name."""
    found: dict[str, Claim] = {}
    for name in FILES:
        found = ClaimsFile(FOLDER / f"{name}.toml").claims(found)
    return found


CLAIMS = read_claims()


def find_claim(name: str) -> Claim:
    """The claim of a name; BadInput where there is none."""
    if name not in CLAIMS:
        hint = did_you_mean(name, list(CLAIMS))
        raise BadInput(f"no such claim: '{name}'{hint}; `polyclinic reproduce --list` shows all")
    return CLAIMS[name]
