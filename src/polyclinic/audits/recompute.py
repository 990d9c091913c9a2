"""Carrying out again what a site did: an operation, from what the site kept, with code of Polyclinic alone.

A parcel that is, byte for byte, what the operation gives for the images that were used holds nothing else: nothing in
last bits, in the order of rows, in names or metadata. One that is not, or whose operation is a plug-in's and of a kind
without a reference here, may hold anything that no attack looks for, and has withstood nothing.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from polyclinic.data.parts import SiteData
from polyclinic.federation.call import Call
from polyclinic.federation.host import SiteHost, secret_in
from polyclinic.federation.layers.call_checks import SumSteps
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.layers.leaving import CoarseScores, Transcript
from polyclinic.federation.ledger.archive import Asked, Release, releases
from polyclinic.federation.ledger.parcel import Parcel, decode
from polyclinic.federation.operation import Transaction
from polyclinic.federation.site import SiteState
from polyclinic.methods import METHODS
from polyclinic.registry import reason
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.run import threads
from polyclinic.study import Study, parse_study

if TYPE_CHECKING:
    from polyclinic.audits.attack import Tools
    from polyclinic.audits.parcels import AuditedParcel

#: packages whose code does what it says; all else is a plug-in's
TRUSTED = ("polyclinic", "torch", "torchvision", "monai")
#: what a plug-in's parcel of a kind is held against: a method of ours and its operation
REFERENCES = {
    "gradients": ("fedsgd", "gradient"),
    "weights": ("fedavg", "train"),
    "latents": ("fedreplay", "give_latents"),
}
#: what else may make last bits differ
ELSEWHERE = "another machine, or a GPU without engine.reproducible, gives other last bits: audit where the study ran"
#: a difference below this share of the largest number may be rounding on another machine
LAST_BITS = 1e-3


def is_ours(thing: Any) -> bool:
    return thing.__module__.split(".")[0] in TRUSTED


#: what is done with a site's images before an operation is carried out again
Change = Callable[[SiteData], SiteData]


class Turn(NamedTuple):
    """What a release is held against: a study with a method of ours, and what to ask of the site.

    `whole`: the method is the study's own, so that all its parcels must be the same and the site's state is trusted."""

    study: Study
    calls: Sequence[Asked]
    whole: bool = True


def reference(study: Study, release: Release) -> Turn | None:
    """None where a plug-in's operation has no reference."""
    method, operation = study.method, release.operation
    if is_ours(type(method)) and is_ours(getattr(method, operation, method)):
        return Turn(study, release.turn)
    kind: Any = next((one for one in type(method).__mro__ if is_ours(one) and one in METHODS.builtin.values()), None)
    settings, calls = method.model_dump(mode="json", exclude_none=True), release.turn
    if kind is None or not hasattr(kind, operation):
        known = next((REFERENCES[one] for one in release.kinds if one in REFERENCES), None)
        if known is None:
            return None
        kind, calls = METHODS[known[0]], [Asked(known[1], {}, ["weights"])]
        if known[0] == "fedavg":
            settings["local_steps"] = max(1, len(release.used))
        elif len(release.used) == 1:
            settings["batch"] = "mini"
    fields = {name: value for name, value in settings.items() if name in kind.model_fields}
    changed = {**fields, "name": kind.model_fields["name"].default}
    return Turn(parse_study({**study.as_tables(), "method": changed}), calls, whole=False)


def plugin_in(assembly: Assembly, site: str) -> str:
    """The first part of a study that is a plug-in's, and that the reference would have to run as well."""
    study = assembly.study
    parts: dict[str, Any] = {"task": study.task, "generator": study.generator}
    network = assembly.build_model(assembly.backbones.get(site))
    parts |= {f"network ({name or 'as a whole'})": one for name, one in network.named_modules()}
    return next((name for name, one in parts.items() if one is not None and not is_ours(type(one))), "")


def carry_out(
    assembly: Assembly, site: str, release: Release, turn: Turn, change: Change = lambda data: data
) -> list[bytes]:
    """The parcels of a turn, encoded, as the site would keep them."""
    with tempfile.TemporaryDirectory() as folder, threads(turn.study.engine.threads):
        # parcels of a sum are kept as they were before they became its rows
        plain = {"federation.sum": "float", "engine.durable": False, "audit.keep_parcels": 0}
        spec = replace(assembly, study=turn.study.with_settings(plain), folder=Path(folder)).host_spec()
        spec = replace(spec, result_settings_json=assembly.result_settings_json)
        host = SiteHost(replace(spec, open_data=lambda name: change(spec.open_data(name))))
        host._arriving = [one for one in host._arriving if not isinstance(one, SumSteps)]
        host.sites.get(site).state = SiteState(release.state if turn.whole else {})
        if assembly.policy is not None:
            _as_deployed(host, site, release, assembly.folder)
        for operation, arguments, names in turn.calls:
            kind_of = getattr(spec.method, operation).operation.kind_of
            received = {name: Parcel(kind_of(name), release.received(name)) for name in names}
            host.handle(Call(site, operation, release.round, received, arguments, str(release.note.get("to", ""))))
        last = turn.calls[-1].operation
        found = [one for one in releases(Path(folder) / "sites" / site / "kept") if one.operation == last]
        return [file.read_bytes() for file in found[-1].files] if found else []


class _Asked(Layer):
    """Random shares of images are drawn by the digest of the call that was asked."""

    digest = ""

    def arriving(self, transaction: Transaction) -> None:
        transaction.asked = self.digest


def _as_deployed(host: SiteHost, site: str, release: Release, folder: Path) -> None:
    """Draws from the site's secret, and the layers of a deployed site that change numbers; not its budgets, ledger and
    people, for whom nothing happens."""
    host.sites.get(site).secret = secret_in(folder / "sites" / site, begun=True)
    asked = _Asked(host)
    asked.digest = str(release.note.get("asked", ""))
    host._arriving += [asked, Transcript(host)]
    coarse = CoarseScores(host)  # once, and by the site's own min_cohort, where a simulated one is by the usual one
    coarse.spec = replace(host.spec, policy=host.spec.policy.model_copy(update={"deployed": True}))
    host._leaving = [coarse, *(one for one in host._leaving if not isinstance(one, CoarseScores))]


def carry_out_changed(assembly: Assembly, site: str, release: Release, change: Change) -> list[Parcel]:
    """The parcels of the study's own operation on other images, without what it does against attacks; none where it
    cannot be carried out again."""
    tables = {name: table for name, table in assembly.study.as_tables().items() if name != "defence"}
    turn = Turn(parse_study(tables), release.turn)
    return [decode(one) for one in carry_out(assembly, site, release, turn, change)] if turn.calls else []


# --- held against what left -----------------------------------------------------------------------------


def why_unexplained(tools: "Tools", audited: "AuditedParcel") -> tuple[str, Mapping[str, Tensor]]:
    """Why a parcel is not shown to hold nothing but what its operation gives, empty where it is; and the tensors that
    the operation gives in its place, where that could be found out."""
    for site, release in audited.parts.items():
        try:
            why, again = _compared(tools, site, release, audited.not_kept)
        except Exception as error:  # whatever stands in the way is a gap in what is known, and no reason to stop
            why, again = f"'{release.operation}' could not be carried out again ({reason(error)})", []
        if why:
            return why, again[audited.number].tensors if audited.number < len(again) else {}
    return "", {}


def _compared(tools: "Tools", site: str, release: Release, not_kept: int) -> tuple[str, list[Parcel]]:
    name = release.operation
    if foreign := plugin_in(tools.assembly, site):
        return f"the study's {foreign} is code of a plug-in, which cannot show what '{name}' gives", []
    turn = reference(tools.assembly.study, release)
    if turn is None:
        return f"'{name}' is code of a plug-in, and there is no reference for what it sends", []
    if not turn.calls:
        return f"too much came to the site before '{name}' to carry it out again", []
    encoded = carry_out(tools.assembly, site, release, turn)
    kept = [file.read_bytes() for file in release.files]
    if kept == encoded or (not turn.whole and kept == [one for one in encoded if one in kept]):
        some = f"'{name}' is code of a plug-in, and {not_kept} of its parcels were not kept; set audit.keep_parcels"
        return (some if not_kept and not turn.whole else ""), []
    again = [decode(one) for one in encoded]
    return f"it is not what '{name}' gives when it is carried out again: {difference(release.parcels, again)}", again


def difference(left: Sequence[Parcel], again: Sequence[Parcel]) -> str:
    """The first thing that differs, in words."""
    if [one.kind for one in left] != [one.kind for one in again]:
        kinds, others = (", ".join(one.kind for one in some) or "nothing" for some in (left, again))
        return f"{kinds} left instead of {others}"
    for one, other in zip(left, again, strict=True):
        if _forms(one) != _forms(other):
            return f"{one.kind} has other names or shapes"
        if (one.metadata, one.privacy) != (other.metadata, other.privacy):
            return f"{one.kind} has other metadata"
        for name, tensor in one.tensors.items():
            apart = (tensor.double() - other.tensors[name].double()).abs()
            if bool((apart != 0).any()):
                share = float(apart.max() / other.tensors[name].double().abs().max().clamp(min=1e-30))
                where = f"{int((apart != 0).sum())} of {tensor.numel()} numbers of '{name}' are others"
                return f"{where}, by up to {share:.1g} of the largest{f'; {ELSEWHERE}' if share < LAST_BITS else ''}"
    return "its bytes are others, its numbers are not"


def _forms(parcel: Parcel) -> list[tuple[str, object, object]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in parcel.tensors.items()]
