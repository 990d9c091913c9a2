"""How many bytes a study will move, told before it begins: a hospital's link may be slow, or paid for."""

from __future__ import annotations

from pathlib import Path

from polyclinic.data.parts import PreparedSites
from polyclinic.data.source import AtSites
from polyclinic.federation.layers.gate import model_bytes
from polyclinic.files import human_bytes
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import Study

#: of the bytes of numbers: what is left of them on the wire
SHARES = {"exact": 1.0, "delta": 1.0, "fp16": 0.5, "int8": 0.25}
#: kinds that are as large as the model
AS_MODEL = frozenset({"weights", "gradients"})


def bytes_a_round(study: Study) -> int | None:
    """Bytes that each site receives in a round, and as many that it sends; None for a method that does not send its
    model back and forth in rounds."""
    if not study.method.traits.gradual or not _releases(study) & AS_MODEL:
        return None
    assert isinstance(study.data, AtSites)
    names = study.sites.site_names()
    prepared = PreparedSites(Path(), names, study.data.info(names))
    return int(model_bytes(Assembly(study, prepared, Path()).trainer()) * SHARES[study.engine.wire])


def _releases(study: Study) -> set[str]:
    """The kinds that the method's operations release."""
    found = (getattr(getattr(study.method, name, None), "operation", None) for name in dir(type(study.method)))
    return {kind for operation in found if operation is not None for kind in operation.releases}


def in_words(study: Study) -> str:
    """One sentence for the owner of a study."""
    each = bytes_a_round(study)
    if each is None:
        return f"'{study.method.name}' sends other parcels than models: its bytes were not estimated"
    rounds = study.method.rounds
    return (
        f"each site receives and sends about {human_bytes(each)} in each of {rounds} rounds, "
        f"{human_bytes(2 * each * rounds)} in all"
    )
