"""How to run it again: the study, versions, seeds and digests."""

from __future__ import annotations

import json

import tomli_w

from polyclinic.report.blocks import Block, Section, Table, Text
from polyclinic.report.evidence import RunEvidence


def section(run: RunEvidence) -> Section:
    result = run.result
    facts = {
        "seed": result["seed"],
        "weights (SHA-256)": result["weights_sha256"],
        "seconds": result["timing"].get("seconds"),
        **{f"{split} images (SHA-256)": digest for split, digest in result["data"].get("digests", {}).items()},
    }
    versions = {name: _words(value) for name, value in result["environment"].items()}
    blocks: list[Block] = [
        Text(
            "`polyclinic run study.toml --out again` with the study below, the same images and the same versions gives "
            "the same weights: compare their SHA-256. Another processor may round otherwise."
        ),
        Table(("", ""), [[name, _words(value)] for name, value in facts.items()], "Seeds and digests"),
        Table(("", ""), [[name, value] for name, value in versions.items()], "Versions and machine"),
        Table(
            ("file", "SHA-256"),
            [[name, digest] for name, digest in sorted(run.sources.items())],
            "Files that this report was made of",
        ),
        Text(tomli_w.dumps(run.study), "code"),
    ]
    return Section("again", "How to run it again", blocks)


def _words(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
