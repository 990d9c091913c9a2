"""Studies that are audited in seconds, and what an audit of a run looks at."""

from polyclinic.audits.attack import Tools
from polyclinic.audits.audit import build_tools
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import parcels_to_audit
from polyclinic.data.parts import prepare
from polyclinic.federation.ledger.archive import releases
from polyclinic.metrics.perceptual import Pixels
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study.tables import EFFORTS

MASKS = {
    "data.source": "brain-phantom", "data.samples": 60, "task.name": "segmentation", "model.backbone": "unet",
}  # fmt: skip
#: methods whose audits are drawn, which takes longer than some attacks: with them every kind of picture is looked at
DRAWN = ("fedavg", "splitnn", "fedreplay", "cwt-replay")
SMALL = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4}


def opened(folder, *kinds, sites=()):
    """The tools of a quick audit of a run, and the parcels of these kinds that it attacks."""
    assembly, lines = open_run(folder)
    tools = build_tools(assembly, "quick", "pixels", "cpu")
    return tools, parcels_to_audit(folder, assembly.study, lines, "quick", kinds, sites)


def first_view(folder, kind, sites=()):
    """The first parcel of a kind as its receiver sees it, and what is true."""
    tools, (audited, *_) = opened(folder, kind, sites=sites)
    return audited.seen(tools), audited.truth(tools)


def what_was_kept(study, folder, effort=None):
    """Tools of an audit, and what each site kept but for its scores."""
    assembly = Assembly(study, prepare(study.data, study.sites), folder)
    tools = Tools(assembly, study.audit.threat, effort or EFFORTS["quick"], Pixels(), 0, "cpu")
    kept = [releases(folder / "sites" / site / "kept") for site in assembly.prepared.names]
    return tools, [[one for one in of_site if one.operation != "evaluate"] for of_site in kept]
