"""Parcels that an audit attacks: in the ledger by their digest, or means over sites; and the released model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from polyclinic.audits.attack import Seen, Tools
from polyclinic.audits.open_run import LedgerLines
from polyclinic.audits.recompute import Change, carry_out_changed
from polyclinic.audits.truth import Truth, join
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.errors import BadInput, WorkFailed, did_you_mean
from polyclinic.federation.call import Call
from polyclinic.federation.layers.defence_and_poisoning import secure_sum
from polyclinic.federation.ledger import archive
from polyclinic.federation.ledger.archive import Release, is_attackable, is_worth_keeping, releases
from polyclinic.federation.ledger.budget import SCORES
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Transaction
from polyclinic.federation.sums.settings import ADD_FINAL_SCORES, ADD_SCORES
from polyclinic.json_types import JsonObject
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import Study
from polyclinic.study.tables import EFFORTS

Kept = Mapping[str, list[Release]]
#: kinds that a secure sum adds up over sites
SUMMED = ("gradients", "weights")
#: kinds that come out of a generator
FROM_GENERATOR = ("generator", "codes", "synthetic-images")
#: attacks on the released model
MEMBERSHIP = ("loss-threshold", "reference-models", "case-membership")


@dataclass(frozen=True)
class AuditedParcel:
    """One parcel of one site, or the mean of one parcel of each of several sites (`parts` by site)."""

    parts: Mapping[str, Release]
    number: int
    others: tuple[Release, ...] = ()  #: further kept releases of the same operation by the same site
    peers: Mapping[str, Release] = field(default_factory=dict)  #: of other sites, of the same operation and round
    not_kept: int = 0  #: parcels of this kind that left the site by this operation, and were not kept
    other_sums: tuple[Mapping[str, Release], ...] = ()  #: of the same operation and sites, in other rounds
    is_released_model: bool = False  #: the model of a run, asked about one site's images: no parcel that left

    @property
    def site(self) -> str:
        """Whose parcel it is; the picture of a sum lies with the first site's, and shows that site's images alone."""
        return next(iter(self.parts))

    @property
    def release(self) -> Release:
        return self.parts[self.site]

    @property
    def parcel(self) -> Parcel:
        return self.release.parcels[self.number]

    @property
    def kind_that_left(self) -> str:
        """The kind under which it left: in a secure sum that is another one."""
        return str(self.release.left[0][0]) if len(self.release.left) == 1 else self.parcel.kind

    @property
    def who(self) -> str:
        return self.site if len(self.parts) == 1 else f"sum of {len(self.parts)} sites"

    @property
    def name(self) -> str:
        return f"{self.who}, round {self.release.round}, {self.release.operation}: {self.parcel.kind}"

    def seen(self, tools: Tools) -> Seen:
        if len(self.parts) == 1:
            seen = Seen.of(self.site, self.release, self.number, tools)
            return replace(seen, more=lambda: self._more(tools), peers=lambda: self._peers(tools))
        mean, first = mean_parcel([one.parcels[self.number] for one in self.parts.values()]), self.release
        seen = Seen(self.site, mean, (mean,), first.received, first.round, first.step, tools, len(self.parts))
        return replace(seen, again=lambda change: self._again(tools, change), more=lambda: self._more(tools))

    @property
    def attacks(self) -> tuple[str, ...]:
        """Names of the attacks to run, where not all that fit the kind make sense; empty: all."""
        return MEMBERSHIP if self.is_released_model else ()

    @property
    def sites(self) -> list[str]:
        return [] if self.is_released_model else list(self.parts)

    @property
    def digests(self) -> list[str]:
        return [self.parts[site].parcels[self.number].digest for site in self.sites]

    def _again(self, tools: Tools, change: Change) -> list[Parcel]:
        """The mean of what the sites let out, one after the other."""
        made = [carry_out_changed(tools.assembly, site, release, change) for site, release in self.parts.items()]
        return [mean_parcel([of_site[self.number] for of_site in made])] if all(made) else []

    def _more(self, tools: Tools) -> tuple[Seen, ...]:
        """The same parcel of the other releases."""
        if self.other_sums:
            return tuple(replace(self, parts=parts, other_sums=()).seen(tools) for parts in self.other_sums)
        alike = [other for other in self.others if other.kinds[self.number : self.number + 1] == [self.parcel.kind]]
        return tuple(Seen.of(self.site, other, self.number, tools) for other in alike)

    def _peers(self, tools: Tools) -> tuple[Seen, ...]:
        """The same parcel of the other sites."""
        alike = {site: one for site, one in self.peers.items() if one.kinds == self.release.kinds}
        return tuple(Seen.of(site, release, self.number, tools) for site, release in alike.items())

    def truth(self, tools: Tools) -> Truth:
        splits = splits_behind(self.release, tools.assembly.study)
        opened = [tools.site_data(site) for site in self.parts]
        data = opened[0] if len(opened) == 1 else join_sites(opened)
        if self.parcel.kind in archive.SUM_KINDS and splits != ("train",):
            return truth_of_scores(data, splits, tools.seed)
        used, start = [], 0
        for release, own in zip(self.parts.values(), opened, strict=True):
            batches = Truth(release.used, own, tools.seed).batches
            used += [index + start for index in batches]
            start += len(own.train)
        return Truth(used, data, tools.seed, own=len(opened[0].train))


def splits_behind(release: Release, study: Study) -> tuple[str, ...]:
    """The splits of the site's images that a release was computed from."""
    work = getattr(study.method, release.operation, None)
    declared = getattr(work, "operation", None)
    if release.split or work is None or declared is None:
        return (release.split or "train",)
    call = Call("", release.operation, release.round, {})
    return Transaction(call, work, declared).splits


def truth_of_scores(data: SiteData, splits: Sequence[str], seed: int) -> Truth:
    """The images that were scored, or summed, take the place of training images; validation and test images that were
    not are the ones held out of it."""
    scored = [getattr(data, name) for name in splits]
    others = [getattr(data, name) for name in ("validation", "test") if name not in splits]
    none = data.test.take(np.arange(0))
    return Truth([], SiteData(data.name, reduce(join, scored), reduce(join, others, none), none), seed)


def mean_parcel(parcels: Sequence[Parcel]) -> Parcel:
    """What a secure sum reveals of several sites' parcels: their mean, each counted by its number of images; of sums of
    products of features their sum."""
    if is_sum_of_products(parcels[0]) or parcels[0].kind == SCORES:
        added = {name: torch.stack([one.tensors[name] for one in parcels]).sum(0) for name in parcels[0].tensors}
        return Parcel(parcels[0].kind, added, {"samples": sum(int(one.metadata.get("samples", 0)) for one in parcels)})
    counts = [int(parcel.metadata.get("samples", 1)) for parcel in parcels]
    total = sum(counts)
    scaled = [
        {name: tensor.double() * count * len(parcels) / total for name, tensor in parcel.tensors.items()}
        for parcel, count in zip(parcels, counts, strict=True)
    ]
    mean = {name: tensor.to(parcels[0].tensors[name].dtype) for name, tensor in secure_sum(scaled).items()}
    steps = sum(int(parcel.metadata.get("steps", 1)) for parcel in parcels)
    return Parcel(parcels[0].kind, mean, {"samples": total, "steps": steps})


def is_sum_of_products(parcel: Parcel) -> bool:
    """Whether a parcel holds the whole numbers of a method of one round (methods/shared/one_round.py)."""
    return parcel.kind == "statistics" and {"products", "cross", "squares"} <= parcel.tensors.keys()


def join_sites(sites: Sequence[SiteData]) -> SiteData:
    """All sites' images as if they were one site's."""

    def of_split(split: str) -> ImageSet:
        parts = [getattr(site, split) for site in sites]
        return reduce(join, [ImageSet(one.images, one.labels, one.masks) for one in parts])  # patients differ by site

    train, validation, test = map(of_split, ("train", "validation", "test"))
    return SiteData(" and ".join(site.name for site in sites), train, validation, test)


# --- choosing parcels ------------------------------------------------------------------------------------------


def _nothing_kept(folder: Path, study: Study, lines: LedgerLines) -> str:
    if study.audit is None:
        cure = "run the study with a table [audit], for example --set audit.keep_parcels=1"
        return f"{folder}: its sites kept no parcels to attack; {cure}"
    left = sorted({str(line["kind"]) for of_site in lines.values() for line in of_site})
    if {*left} & {*archive.ATTACKABLE_KINDS, *archive.SUM_KINDS}:
        return f"{folder}: its sites kept none of the parcels that left ({', '.join(left)}); run the study again"
    return (
        f"{folder}: what left its sites ({', '.join(left) or 'nothing'}) is of no kind that an audit attacks, so "
        f"nothing was tested; it attacks {', '.join((*archive.ATTACKABLE_KINDS, *archive.SUM_KINDS))}"
    )


def parcels_to_audit(
    folder: Path, study: Study, lines: LedgerLines, budget: str, kinds: tuple[str, ...], sites: tuple[str, ...]
) -> list[AuditedParcel]:
    """What is to be attacked; every parcel of it is what its site's ledger says left."""
    kept = {path.parent.name: read_archive(path) for path in sorted((folder / "sites").glob("*/kept"))}
    if not any(kept.values()):
        raise BadInput(_nothing_kept(folder, study, lines))
    _check_names("--sites", sites, list(kept))
    of_plugins = [kind for kind in KINDS if kind not in KINDS.builtin]
    _check_names("--kinds", kinds, [*archive.ATTACKABLE_KINDS, *archive.SUM_KINDS, *of_plugins])
    wanted = {site: found for site, found in kept.items() if not sites or site in sites}
    summed = (study.audit is not None and study.audit.secure_sum) or study.federation.sum == "secure"
    groups = group_for_sums(wanted, budget) if summed else choose_releases(wanted, budget, every_site=bool(sites))
    found = []
    for group in groups:
        for site, release in group.items():
            check_against_ledger(site, release, lines.get(site, []))
        parcels = next(iter(group.values())).parcels
        others = () if summed else other_releases(wanted, group, lines)
        peers = {} if summed else releases_at_once(kept, group, lines)
        operation = next(iter(group.values())).operation
        alike = [one for one in groups if one is not group and next(iter(one.values())).operation == operation]
        sums = tuple(alike) if summed else ()
        secret = summed and operation not in (ADD_SCORES, ADD_FINAL_SCORES)
        wanted_numbers = [n for n, parcel in enumerate(parcels) if _is_wanted(parcel, kinds, secret)]
        chosen = [AuditedParcel(group, n, others, peers, other_sums=sums) for n in wanted_numbers]
        found += [replace(one, not_kept=count_not_kept(one, kept, lines)) for one in chosen]
    if not found:
        raise BadInput(_no_parcels(wanted, kinds))
    # what may show images comes first
    return sorted(found, key=lambda audited: audited.parcel.kind in archive.SUM_KINDS)


def count_not_kept(one: AuditedParcel, kept: Kept, lines: LedgerLines) -> int:
    """Parcels of its kind that left its sites by its operation, less those that they kept."""
    operation, kind = one.release.operation, one.kind_that_left
    left = [line for site in one.parts for line in lines.get(site, ()) if line["operation"] == operation]
    there = [release for site in one.parts for release in kept[site] if release.operation == operation]
    return sum(line["kind"] == kind for line in left) - sum(release.kinds.count(one.parcel.kind) for release in there)


def other_releases(kept: Kept, group: Mapping[str, Release], lines: LedgerLines) -> tuple[Release, ...]:
    """What else the site kept of the same operation, held against its ledger as well."""
    ((site, release),) = group.items()
    found = tuple(one for one in kept[site] if one.operation == release.operation and one.name != release.name)
    for one in found:
        check_against_ledger(site, one, lines.get(site, []))
    return found


def releases_at_once(kept: Kept, group: Mapping[str, Release], lines: LedgerLines) -> dict[str, Release]:
    """What other sites kept of the same operation, round and step; not what their ledgers do not confirm."""
    ((site, release),) = group.items()
    when = (release.operation, release.round, release.step)

    def is_confirmed(site: str, release: Release) -> bool:
        try:
            check_against_ledger(site, release, lines.get(site, []))
        except WorkFailed:  # damage at another site does not stop the audit of this one
            return False
        return True

    return {
        name: one
        for name, of_site in kept.items()
        for one in of_site
        if name != site and (one.operation, one.round, one.step) == when and is_confirmed(name, one)
    }


def _is_wanted(parcel: Parcel, kinds: tuple[str, ...], summed: bool) -> bool:
    asked = parcel.kind in kinds if kinds else is_worth_keeping(parcel)
    return asked and (parcel.kind in SUMMED or is_sum_of_products(parcel) or not summed)


def read_archive(folder: Path) -> list[Release]:
    """The releases in a site's archive of parcels."""
    try:
        found = releases(folder)
        for release in found:
            _ = release.operation, release.round, release.step
    except (OSError, ValueError, KeyError, TypeError):
        raise WorkFailed(f"{folder}: a note of what was kept cannot be read; restore it or run it again") from None
    return found


def _no_parcels(kept: Kept, kinds: tuple[str, ...]) -> str:
    kinds_kept = {kind for found in kept.values() for release in found for kind in release.kinds}
    there = sorted(kind for kind in kinds_kept if is_attackable(kind) or kind in archive.SUM_KINDS)
    if kinds:
        asked = " or ".join(kinds)
        return f"--kinds: no parcel of kind {asked} is to be attacked; sites kept {', '.join(there)}"
    return f"audit.secure_sum: gradients and weights can be summed, and sites kept {', '.join(there)}; set it to false"


def choose_releases(kept: Kept, budget: str, *, every_site: bool) -> list[dict[str, Release]]:
    """As many sites (all, where they were asked for by name) and releases of each operation as the budget has."""
    allowed = EFFORTS[budget]
    picked: list[dict[str, Release]] = []
    for of_sites in group_by_operation(kept).values():
        for site in list(of_sites)[: None if every_site else allowed.sites or None]:
            picked += [{site: release} for release in by_expected_leak(of_sites[site])[: allowed.releases or None]]
    return picked


def by_expected_leak(found: list[Release]) -> list[Release]:
    """Releases, those that are likely to leak most first: the last ones of a generator, which has learned longest. Of
    updates the first, when the network fits the images least, and then the last, which remembers most members."""
    if set(found[0].kinds) & set(FROM_GENERATOR):
        return found[::-1]
    return [found[0], *found[:0:-1]]


def group_for_sums(kept: Kept, budget: str) -> list[dict[str, Release]]:
    """Releases that several sites kept of the same operation, round and step, as many as the budget has."""
    found: list[dict[str, Release]] = []
    for of_sites in group_by_operation(kept).values():
        at_once: dict[tuple[int, int], dict[str, Release]] = {}
        for site, of_site in of_sites.items():
            for release in of_site:
                at_once.setdefault((release.round, release.step), {})[site] = release
        full = [group for group in at_once.values() if len(group) == len(of_sites) > 1]
        full = [*full[:1], *full[:0:-1]]  # the first round, and then the last
        found += full[: EFFORTS[budget].releases or None]
    if not found:
        raise BadInput(
            "audit.secure_sum: no operation was done by several sites at once, and a deployed site has only its own "
            "part; set it to false"
        )
    return found


def group_by_operation(kept: Kept) -> dict[str, dict[str, list[Release]]]:
    groups: dict[str, dict[str, list[Release]]] = {}
    for site, found in kept.items():
        for release in found:
            groups.setdefault(release.operation, {}).setdefault(site, []).append(release)
    return groups


def check_against_ledger(site: str, release: Release, lines: list[JsonObject]) -> None:
    """WorkFailed unless the kept files are all there and, byte for byte, what the site's ledger says left."""
    if not lines:
        raise WorkFailed(f"site '{site}': there is no ledger to hold what it kept against; restore ledger/{site}.jsonl")
    left = {(line["round"], line["operation"], line["kind"], line["digest"]) for line in lines}
    numbers = [int(file.name.split("-")[0]) for file in release.files]
    if not numbers or numbers != list(range(len(numbers))):
        raise WorkFailed(f"site '{site}': {release.folder} lacks a parcel that was kept; it was changed since")
    for kind, digest in release.left:
        if (release.round, release.operation, kind, digest) not in left:
            raise WorkFailed(f"site '{site}': {release.folder} says of {kind} what its ledger does not; it was changed")
    as_they_are = () if release.left else zip(release.files, release.kinds, release.digests, strict=True)
    for file, kind, digest in as_they_are:
        if (release.round, release.operation, kind, digest) not in left:
            raise WorkFailed(f"site '{site}': {file} is not what its ledger says left; it was changed since")
    try:
        _ = release.used
    except (OSError, SafetensorError, KeyError, RuntimeError):
        where = release.folder / "context.safetensors"
        raise WorkFailed(f"site '{site}': {where} cannot be read, so no attack can be scored; restore it") from None


def _check_names(flag: str, given: tuple[str, ...], known: list[str]) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise BadInput(f"{flag}: no such choice: '{name}'{hint}; choose from {', '.join(known)}")


def released_models(folder: Path, assembly: Assembly, chosen: Sequence[AuditedParcel]) -> list[AuditedParcel]:
    """The released model for each site whose weights are attacked; none where it is of a round that is attacked anyway,
    or where the run has none (a deployed site, an unfinished run)."""
    asked = [one for one in chosen if one.parcel.kind == "weights" and len(one.parts) == 1]
    file, best = folder / "model.safetensors", best_round(folder)
    if not asked or best is None or not file.is_file() or assembly.open_data is not None:
        return []
    if best in {one.release.round for one in asked}:
        return []  # what its sites sent in that round is attacked, which tells more
    try:
        parcels = [Parcel("weights", load_file(file), {})]
    except (OSError, SafetensorError):
        return []
    facts = {"name": f"released-{best:05d}", "round": best, "step": 0, "operation": "released model", "split": ""}
    released: Any = SimpleNamespace(
        **facts, left=(), parcels=parcels, kinds=["weights"], used=[], received=lambda kind: {}
    )
    sites = dict.fromkeys(one.site for one in asked)
    return [AuditedParcel({site: released}, 0, is_released_model=True) for site in sites]


def best_round(folder: Path) -> int | None:
    """The round of the released model, as the result says."""
    try:
        found = json.loads((folder / "result.json").read_text(encoding="utf-8"))["selected"]["round"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) and found > 0 else None
