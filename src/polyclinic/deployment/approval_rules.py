"""What a site's own people wrote into policy.toml of its kit: what may leave, and which studies need no person.

Without the table [approve] a person must approve every study.
"""

import contextlib
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from polyclinic.data.own_images import read_toml
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Policy
from polyclinic.json_types import JsonObject
from polyclinic.models import read_weights
from polyclinic.settings import Settings, sentences

#: what a site's policy says where its file does not: the least that a first study needs, so that nothing leaves from
#: which images of single patients are rebuilt; `max_scores` are parcels of metrics over all its runs
SITE_DEFAULTS: dict[str, Any] = {
    "kinds": ("weights", "statistics", "metrics", "keys", "masked", "shares"),
    "max_scores": 1000,
}


def policy_of(file: Path) -> Policy:
    """The policy in a site's file. `deployed` is what every such site is, and no setting; the table [approve] holds
    rules about studies, for `approval_rules`."""
    tables = {name: value for name, value in read_toml(file).items() if name != "approve"}
    if "deployed" in tables:
        raise BadInput(f"{file}: 'deployed' is not a setting; take it out")
    try:
        return Policy(**{**SITE_DEFAULTS, **tables}, deployed=True)
    except ValidationError as error:
        raise BadInput(f"{file}: {sentences(error, '', Policy)}") from None


#: how the name of a rule begins where it approves, instead of a person's
BY_RULE = "the rule "
#: the table of policy.toml that holds the rules
TABLE = "approve"
#: tables of a study that decide neither what is computed from images nor what leaves
NOT_ABOUT_IMAGES = ("format", "engine", "plugins")


class ApprovalRules(Settings):
    """The table [approve] of policy.toml."""

    every: bool = Field(False, description="approve every study without a person: for rehearsals with drawn images")
    methods: tuple[str, ...] = Field(
        (),
        description="approve studies of these methods without a person, within the limits below; with a table [replay] "
        "a method is another one, such as 'fedavg+replay'",
    )
    max_rounds: int | None = Field(None, ge=1, description="rounds that such a study may have")
    max_epsilon: float | None = Field(
        None, gt=0, description="such a study sets privacy.target_epsilon to this at most, and privacy.cover = 'all'"
    )
    max_local_steps: int | None = Field(
        None, ge=1, description="steps of a round that such a study may have; it must then set method.local_steps"
    )
    max_size: int | None = Field(None, ge=1, description="pixels of a side that such a study may ask for (data.size)")
    networks: tuple[str, ...] = Field((), description="networks that such a study may train; none named: any")
    max_a_day: int = Field(20, ge=0, description="studies that `methods` and `same_as_last` may approve in a day")
    same_as_last: bool = Field(False, description="approve what differs from the last approved study by its seed only")

    def reason_to_approve(self, study: JsonObject, last: JsonObject | None, today: int = 0) -> str | None:
        """The rule that approves this study, in words; None if a person must. `last` is the study that was approved
        last, `today` how many rules have approved. Studies are given as their tables, every default written out."""
        if self.every:
            return f"{BY_RULE}approve.every"
        if today >= self.max_a_day:
            return None
        if self.same_as_last and last is not None and not changed_settings(last, study, but=("seed",)):
            return f"{BY_RULE}approve.same_as_last"
        # a generator that leaves makes it another method
        name = study["method"]["name"] + ("+replay" if study.get("replay") else "")
        if name in self.methods and self._within_limits(study):
            return f"{BY_RULE}approve.methods"
        return None

    def _within_limits(self, study: JsonObject) -> bool:
        method, model = study["method"], study.get("model", {})
        few = (
            _is_within(method["rounds"], self.max_rounds)
            and _is_within(method.get("local_steps"), self.max_local_steps)
            and _is_within(study.get("data", {}).get("size"), self.max_size)
        )
        networks = {model.get("backbone"), *(model.get("backbones") or {}).values()}
        few &= not self.networks or networks <= set(self.networks)
        privacy = study.get("privacy", {})  # must cover everything that leaves
        is_private = privacy.get("cover") == "all" and _is_within(privacy.get("target_epsilon"), self.max_epsilon)
        return few and (self.max_epsilon is None or is_private)


def _is_within(number: Any, most: float | None) -> bool:
    """Whether a number keeps a limit; one that is not given does so only where there is none."""
    return most is None or (number is not None and number <= most)


def rules_of(file: Path) -> ApprovalRules:
    """The rules in a site's policy.toml."""
    try:
        return ApprovalRules.model_validate(read_toml(file).get(TABLE, {}))
    except ValidationError as error:
        raise BadInput(f"{file}: {sentences(error, TABLE, ApprovalRules)}") from None


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], but: tuple[str, ...] = ()) -> list[str]:
    """What differs between two studies, a sentence for each setting; tables that are not about images are left out."""
    found = []
    for table in sorted({**before, **now}):
        if table in (*NOT_ABOUT_IMAGES, *but) or before.get(table) == now.get(table):
            continue
        old, new = before.get(table), now.get(table)
        if not isinstance(old, Mapping | None) or not isinstance(new, Mapping | None):
            found.append(_change(table, old, new))
            continue
        old, new = old or {}, new or {}
        names = [name for name in sorted({**old, **new}) if old.get(name) != new.get(name)]
        found += [_change(f"{table}.{name}", old.get(name), new.get(name)) for name in names]
    return found


def differ_in_numbers_only(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two studies are the same but for numbers: a learning rate, a count, one that is given or is not."""
    before, now = ({n: _without_numbers(t) for n, t in one.items() if n not in NOT_ABOUT_IMAGES} for one in (a, b))
    return {n: t for n, t in before.items() if t is not None} == {n: t for n, t in now.items() if t is not None}


def _without_numbers(value: Any) -> Any:
    """A plain value, in which every number is None, and nothing is left of what is None."""
    if isinstance(value, Mapping):
        found = {name: _without_numbers(one) for name, one in value.items()}
        return {name: one for name, one in found.items() if one is not None}
    if isinstance(value, list | tuple):
        return [one for one in map(_without_numbers, value) if one is not None]
    return None if isinstance(value, int | float) and not isinstance(value, bool) else value


def _change(setting: str, old: Any, new: Any) -> str:
    if old is None:
        return f"{setting} is new: {new}"
    return f"{setting} was {old} and is now {'not set' if new is None else new}"


class NameTaken(BadInput):
    """A study that cannot wait here; may be told to the coordinator."""


def refuse_odd_text(value: Any, names: Sequence[str] = ()) -> None:
    """NameTaken for text of a study that a person could take for another: names of other letters than ASCII, control
    characters, and words of letters of two scripts, of which one looks like the other."""
    for name in names:
        if not name.isascii():
            raise NameTaken(f"{name!a}: names of runs and sites have letters of ASCII only; rename it")
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for one in value:
            refuse_odd_text(one)
    if not isinstance(value, str):
        return
    odd = unicodedata.normalize("NFC", value) != value
    odd |= any(unicodedata.category(letter)[0] in "C" for letter in value)
    for word in "".join(letter if letter.isalpha() else " " for letter in value).split():
        scripts = {unicodedata.name(letter, "?").split()[0] for letter in word}
        odd |= len(scripts) > 1 and not scripts <= JAPANESE
    if odd:
        raise NameTaken(f"{ascii(value)[:100]}: has characters that look like others, or do not show; write it plainly")


#: scripts that stand in one word; what begins the names of their letters
JAPANESE = {"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"}


#: which way each number of a policy lets out more
LESS_IS_WIDER = ("min_cohort",)
MORE_IS_WIDER = ("max_bytes", "max_epsilon", "max_delta", "max_scores")
LISTS = ("kinds", "accountants")
STRICTEST = {"unit": "patient", "scores": "coarse", "draws": "own", "shares": "random", "few_images": "refuse"}


def widened(before: Mapping[str, Any], now: Policy) -> list[str]:
    """In what a policy lets out more than the one that a study was approved under, a sentence for each setting.

    A change whose direction is not known counts as wider."""
    found = []
    for name, new in now.model_dump(mode="json").items():
        old = before.get(name)
        if new != old and not _is_narrower(name, old, new):
            found.append(_change(f"policy.toml: {name}", "without a limit" if old is None else old, new))
    return found


def _is_narrower(name: str, old: Any, new: Any) -> bool:
    if name == "incoming":  # stops all that it stopped before; None: there was no such table
        if old is None or not old["on"]:
            return bool(new["on"])
        limits = [limit for limit in new if limit != "on"]
        narrower = all(limit in old and new[limit] <= old[limit] for limit in limits)  # another version has others
        return new["on"] and old.keys() <= new.keys() and narrower
    if name in LISTS:
        return old is not None and set(new) <= set(old)
    if name in MORE_IS_WIDER:
        without_limit = old is None and name != "max_delta"  # whose default is a number that depends on the images
        return new is not None and (without_limit or (old is not None and new <= old))
    if name in LESS_IS_WIDER:
        return old is not None and new >= old
    return (name, new) in STRICTEST.items()


def trusted_tensors(folder: Path, digest: str | None) -> Path | None:
    """The file in a folder whose tensors have this digest, as those of a second model (`method.against`) have."""
    for file in sorted(folder.glob("*.safetensors")) if digest else ():
        with contextlib.suppress(BadInput):  # a file that is something else
            if Parcel("weights", dict(read_weights(file).tensors)).digest == digest:
                return file
    return None
