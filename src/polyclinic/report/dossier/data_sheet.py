"""The data sheet of synthetic images that left sites: what they are, how they were made, and what they are not for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyclinic.report.dossier.figures import in_bytes
from polyclinic.report.dossier.sections import ENCODED, NOT_SYNTHETIC, SYNTHETIC
from polyclinic.runner.model_card import plain, table


def data_sheet(result: Mapping[str, Any], study: Mapping[str, Any], audit: Mapping[str, Any]) -> str:
    """In Markdown, after Gebru et al. (2021), Datasheets for Datasets."""
    by_kind = result.get("communication", {}).get("by_kind", {})
    found = {kind: by_kind[kind] for kind in SYNTHETIC if kind in by_kind}
    encoded = [f"{kind} left: {NOT_SYNTHETIC}" for kind in ENCODED if kind in by_kind]
    if not found:
        nothing = "No synthetic images, and nothing that makes them, left a site in this run."
        return "\n\n".join(["# Data sheet", nothing, *encoded]) + "\n"
    verdicts = audit.get("verdicts", {})
    parts = [
        [
            "# Data sheet of synthetic images",
            "",
            *table(["what left", "size"], [(k, in_bytes(v)) for k, v in found.items()]),
        ],
        ["## Why they were made", "", "So that sites learn from each other's patients without seeing their images."],
        ["## What they are", "", *_composition(result, study)],
        ["## How they were made", "", *_making(study)],
        ["## What they tell about patients", "", *_privacy(result, verdicts, found)],
        ["## What they are not for", "", *_not_for()],
        *([["## What else left", "", "\n\n".join(encoded)]] if encoded else []),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _composition(result: Mapping[str, Any], study: Mapping[str, Any]) -> list[str]:
    data = result.get("data", {})
    size = study.get("data", {}).get("size", "the study's number of")
    return [
        f"Images of {plain(size)} pixels a side, or networks that such images are made with. They follow the "
        f"training images of the source {plain(data.get('source', 'not known'))}. No image shows a real patient on "
        "purpose; a generator can still repeat what it has seen."
    ]


def _making(study: Mapping[str, Any]) -> list[str]:
    generator = study.get("generator", {})
    if not generator:
        return ["The study does not say by which generator."]
    return [
        "By this generator, at each site, from its own training images:",
        "",
        *table(["setting", "value"], generator.items()),
    ]


def _privacy(result: Mapping[str, Any], verdicts: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    private = result.get("privacy")
    lines = (
        ["Made without differential privacy."]
        if not private
        else [
            f"Epsilon {private.get('epsilon'):.4g} at delta {private.get('delta'):.4g}. It covers: "
            f"{plain('; '.join(private.get('covers', [])) or 'nothing')}. It does not cover: "
            f"{plain('; '.join(private.get('does_not_cover', [])) or 'nothing')}."
        ]
    )
    rows = [(kind, verdicts[kind].get("words", "no words")) for kind in found if kind in verdicts]
    if not rows:
        return [*lines, "", "Nobody attacked them: there is no audit of these kinds of parcel."]
    return [*lines, "", *table(["kind", "what an audit found"], rows)]


def _not_for() -> list[str]:
    return [
        "- They are not a replacement for real test images: a model that is good on them may be bad on patients.",
        "- They must not be published as images of patients, and not without a decision of the sites they came from.",
        "- Rare findings may be missing, or may be copies of one patient.",
    ]
