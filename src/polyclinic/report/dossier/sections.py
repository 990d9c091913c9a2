"""The sections of a dossier, in the order in which hospitals are asked: technical documentation, control of what is
exported, data protection. Everything that is known about a run stands there with its place in the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyclinic.attacks.verdict import verdict_word
from polyclinic.report.dossier.figures import Evidence, NoFigure, pointer
from polyclinic.report.dossier.parts import Bullets, Part, Section, Table, cells, say
from polyclinic.runner.model_card import EACH_ITS_OWN, LIMITS

RESULT, STUDY, AUDIT, POLICY = (
    f"evidence/{name}" for name in ("result.json", "study.toml", "audit.json", "policy.toml")
)
#: kinds of parcel that are, or make, images that no patient is in
SYNTHETIC = ("synthetic-images", "generator")
#: kinds of parcel that are computed from real training images
ENCODED = ("codes", "latents", "activations")
NOT_SYNTHETIC = "computed from real training images, and an attacker may rebuild these; it is no synthetic data."
PURPOSE = (
    "This dossier collects evidence about one model and how it was trained. It does not say that a law, a standard "
    "or a hospital's own rule is met, and it is not a certificate. People decide about that, with this and with what "
    "only they know."
)


def sections_of(evidence: Evidence, ledgers: Mapping[str, str], broken: Mapping[str, str]) -> list[Section]:
    """All sections; `ledgers` names the ledger file of each site, `broken` what is wrong with a ledger."""
    return [
        Section("model", "1. The model", "technical documentation", _model(evidence)),
        Section("performance", "2. How good it is", "technical documentation", _performance(evidence)),
        Section("limits", "3. Limits of use", "technical documentation", _limits()),
        Section(
            "left", "4. What left each site", "export control of models and data", _left(evidence, ledgers, broken)
        ),
        Section("policy", "5. Under which policy", "export control of models and data", _policy(evidence)),
        Section("audit", "6. What an attacker could recover", "export control, data protection", _audit(evidence)),
        Section("privacy", "7. Differential privacy", "data-protection impact", _privacy(evidence)),
        Section("synthetic", "8. Synthetic images", "data-protection impact", _synthetic(evidence)),
        Section("open", "9. What only the institution knows", "all of them", _open()),
    ]


def _tables(evidence: Evidence, file: str, *steps: str) -> Mapping[str, Any]:
    """A table of a file; empty where there is none."""
    try:
        found = evidence.value(file, pointer(*steps))
    except NoFigure:
        return {}
    return found if isinstance(found, Mapping) else {}


def _model(evidence: Evidence) -> list[Part]:
    of = evidence.figure
    rows = [
        cells("task", of(RESULT, "/task", "text")),
        cells("method", of(RESULT, "/method", "text")),
        cells("network", of(STUDY, "/model/backbone", "text")),
        cells("model", of(RESULT, "/model", "text")),
        cells("rounds", of(RESULT, "/rounds", "count")),
        cells("seed", of(RESULT, "/seed", "text")),
        cells("source of the images", of(RESULT, "/data/source", "text")),
        cells("trained with polyclinic", of(RESULT, "/environment/polyclinic", "text")),
        cells("SHA-256 of the weights", of(RESULT, "/weights_sha256", "text")),
        cells("SHA-256 of model.safetensors", of(RESULT, "/model_sha256", "text")),
    ]
    counts = _tables(evidence, RESULT, "data", "counts")
    splits = list(dict.fromkeys(split for of_site in counts.values() for split in of_site))
    images = [
        cells(site, *(of(RESULT, pointer("data", "counts", site, split), "count") for split in splits))
        for site in counts
    ]
    return [
        say("The model card in model_card.md says in words what follows here in figures."),
        Table(["what", "value"], rows),
        say("Images of each site:"),
        Table(["site", *splits], images),
    ]


def _performance(evidence: Evidence) -> list[Part]:
    of = evidence.figure
    metrics = _tables(evidence, RESULT, "metrics", "test")
    if not metrics:
        return [say("No test images were scored. Nothing is known about how good the model is on new patients.")]
    sites = _tables(evidence, RESULT, "metrics", "per_site")
    of_sites = [
        cells(site, *(of(RESULT, pointer("metrics", "per_site", site, name)) for name in metrics)) for site in sites
    ]
    return [
        *_of_all_sites(evidence, list(metrics)),
        say("Of each site:"),
        Table(["site", *metrics], of_sites),
        say(
            "The mean distance between the sites' distributions of labels (KS) is ",
            of(RESULT, "/heterogeneity/mean_ks"),
            ".",
        ),
    ]


def _of_all_sites(evidence: Evidence, names: Sequence[str]) -> list[Part]:
    """Where each site has a model, the interval is not of the mean over the models: it gets a table of its own."""
    tested = {name: pointer("metrics", "test", name) for name in names}
    if _tables(evidence, RESULT).get("model") != EACH_ITS_OWN:
        return _with_intervals(evidence, "On the test images of all sites together", tested)
    rows = [cells(name, evidence.figure(RESULT, place)) for name, place in tested.items()]
    pooled = ("metrics", "intervals", "pooled")
    own = {name: pointer(*pooled, name, "value") for name in _tables(evidence, RESULT, *pooled)}
    return [
        say("On the test images of all sites together, the mean over the sites' models:"),
        Table(["metric", "value"], rows),
        *(_with_intervals(evidence, "Each image by its own site's model", own) if own else []),
    ]


def _with_intervals(evidence: Evidence, words: str, places: Mapping[str, str]) -> list[Part]:
    """Values, by metric, with the intervals of all images together."""
    of = evidence.figure
    rows = [
        cells(
            name,
            of(RESULT, place),
            of(RESULT, pointer("metrics", "intervals", "pooled", name, "low")),
            of(RESULT, pointer("metrics", "intervals", "pooled", name, "high")),
        )
        for name, place in places.items()
    ]
    unit = of(RESULT, "/metrics/intervals/unit", "text")
    ends = ["; the ends of the interval are of 95 % (bootstrap by ", unit, "):"] if unit else [":"]
    return [say(words, *ends), Table(["metric", "value", "from", "to"], rows)]


def _limits() -> list[Part]:
    return [Bullets([[sentence] for sentence in LIMITS])]


def _left(evidence: Evidence, ledgers: Mapping[str, str], broken: Mapping[str, str]) -> list[Part]:
    of = evidence.figure
    kinds = sorted(_tables(evidence, RESULT, "communication", "by_kind"))
    rows = [
        cells(
            site,
            of(file, "lines", "count"),
            *(of(file, f"sum bytes kind={kind}", "bytes") for kind in kinds),
            of(RESULT, pointer("ledgers", site, "digest"), "text"),
        )
        for site, file in ledgers.items()
    ]
    return [
        say(
            "Every release of a site is a line of its ledger. Each line holds the digest of the line before it, so "
            "that a line cannot be changed or taken out unnoticed. 'polyclinic report verify' follows the chains again."
        ),
        *(say(f"The ledger of {site} does not hold: {why}.") for site, why in broken.items()),
        Table(["site", "releases", *kinds, "digest of the last line"], rows),
        say(
            "In all, ",
            of(RESULT, "/communication/sent_bytes", "bytes"),
            " left the sites and ",
            of(RESULT, "/communication/received_bytes", "bytes"),
            " came to them.",
        ),
    ]


def _policy(evidence: Evidence) -> list[Part]:
    of = evidence.figure
    parts: list[Part] = []
    if of(POLICY, "/kinds", "list") is not None:
        parts += [
            say(
                "The policy of this site, as its own people wrote it (policy.toml): kinds of parcel that may leave: ",
                of(POLICY, "/kinds", "list"),
                ".",
            ),
        ]
    else:
        parts += [
            say(
                "The sites were simulated, or the policy of a real site is not in this folder: it stays at the site. "
                "In the study, the kinds of parcel that may leave are: ",
                of(STUDY, "/policy/kinds", "list"),
                ".",
            ),
        ]
    defence = _tables(evidence, STUDY, "defence")
    if defence:
        rows = [cells(name, of(STUDY, pointer("defence", name), "text")) for name in defence]
        parts.append(Table(["defence of the study", "setting"], rows))
    return parts


def _audit(evidence: Evidence) -> list[Part]:
    of = evidence.figure
    verdicts = _tables(evidence, AUDIT, "verdicts")
    if not verdicts:
        return [
            say(
                "No audit came with this run: nobody attacked what left the sites. 'polyclinic audit RUN' does, and "
                "the dossier has to be made again after it."
            )
        ]
    rows = [
        cells(
            kind,
            of(AUDIT, pointer("verdicts", kind, "left"), "count"),
            of(AUDIT, pointer("verdicts", kind, "verdict"), "text") or _verdict(of_kind),
            of(AUDIT, pointer("verdicts", kind, "words"), "text"),
        )
        for kind, of_kind in verdicts.items()
    ]
    return [
        say(
            "Who attacks, and with what knowledge: ",
            of(AUDIT, "/threat_model", "text"),
            "; effort: ",
            of(AUDIT, "/budget", "text"),
            ".",
        ),
        Table(["kind of parcel", "parcels", "verdict", "in words"], rows),
        say(
            "Withstood: the attacks found nothing, and with the same effort they find a weak leak that was planted. A "
            "better attack may come. Pictures of what was recovered "
            "are not copied into the dossier, because they may show patients."
        ),
    ]


def _verdict(of_kind: Any) -> str:
    return verdict_word(of_kind if isinstance(of_kind, Mapping) else {})


def _privacy(evidence: Evidence) -> list[Part]:
    of = evidence.figure
    if of(RESULT, "/privacy/epsilon") is None:
        return [
            say(
                "Nothing was trained with differential privacy. No bound is proved for what the model, or what left, "
                "tells about one patient."
            )
        ]
    sites = _tables(evidence, RESULT, "privacy", "per_site")
    rows = [
        cells(
            site,
            of(RESULT, pointer("privacy", "per_site", site, "epsilon")),
            of(RESULT, pointer("privacy", "per_site", site, "delta")),
        )
        for site in sites
    ]
    return [
        say(
            "Epsilon ",
            of(RESULT, "/privacy/epsilon"),
            " at delta ",
            of(RESULT, "/privacy/delta"),
            ", computed by ",
            of(RESULT, "/privacy/accountant", "text"),
            "; of the site that spent most.",
        ),
        Bullets(
            [
                ["It covers: ", of(RESULT, "/privacy/covers", "list") or "not known"],
                ["It does not cover: ", of(RESULT, "/privacy/does_not_cover", "list") or "not known"],
            ]
        ),
        *([Table(["site", "epsilon", "delta"], rows)] if rows else []),
    ]


def _synthetic(evidence: Evidence) -> list[Part]:
    of = evidence.figure
    left = _tables(evidence, RESULT, "communication", "by_kind")
    found, encoded = ([kind for kind in kinds if kind in left] for kinds in (SYNTHETIC, ENCODED))
    parts: list[Part] = [say(f"{kind} left: {NOT_SYNTHETIC}") for kind in encoded]
    if not found:
        return [
            say("No synthetic images, and nothing that makes them, left a site. data_sheet.md says the same."),
            *parts,
        ]
    rows = [cells(kind, of(RESULT, pointer("communication", "by_kind", kind), "bytes")) for kind in found]
    return [
        say("What left and can make, or is, synthetic images; data_sheet.md is their data sheet:"),
        Table(["kind", "bytes"], rows),
        say("Made by: ", of(STUDY, "/generator/name", "text"), "."),
        *parts,
    ]


def _open() -> list[Part]:
    questions = (
        "Who is responsible for the processing, and on which legal basis?",
        "Which committee or officer approved the study, and under which number?",
        "Were patients informed, and could they object?",
        "What is the model meant to be used for, by whom, and what happens when it is wrong?",
        "Which risks for patients were found, and who accepted what is left of them?",
        "Who watches the model in use, and who may switch it off?",
    )
    return [
        say("Polyclinic cannot know the answers. They belong to the dossier before somebody decides."),
        Bullets([[question] for question in questions]),
    ]
