"""An audit at a hospital carries out again what was sent, with the secrets of its kit; and notices what was changed."""

from pathlib import Path

import pytest
from attacked_site import PRIVATE, Kit, ask, first_weights

from polyclinic.audits.audit import build_tools
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import parcels_to_audit
from polyclinic.audits.recompute import why_unexplained


@pytest.mark.parametrize(
    "policy", [{}, {"shares": "equal", "draws": "study", "scores": "coarse"}], ids=["own", "study"]
)
@pytest.mark.parametrize("changes", [{}, {"privacy": PRIVATE, "model__norm": "group"}], ids=["plain", "private"])
def test_what_a_hospital_sent_is_recomputed_from_its_secret(tmp_path: Path, policy, changes):
    """Its batches, shares and noise follow from a secret that is in the kit alone."""
    kit = Kit(tmp_path / "kit")
    kit.policy(**policy)
    host = kit.host(audit__keep_parcels=0, **changes)
    ask(host, "train", 1, weights=first_weights(host))
    ask(host, "evaluate", 1, weights=first_weights(host), split="validation")
    run = kit.folder / "runs" / "run"
    assembly, lines = open_run(run)
    tools = build_tools(assembly, "quick", "pixels", "cpu")
    found = parcels_to_audit(run, assembly.study, lines, "standard", (), ())
    assert {one.parcel.kind for one in found} >= {"weights"}
    assert [why_unexplained(tools, one)[0] for one in found] == [""] * len(found)
    (run / "sites" / "north" / "noise.key").write_text("0" * 64)
    assert bool(why_unexplained(tools, found[0])[0]) == (not policy or bool(changes))
