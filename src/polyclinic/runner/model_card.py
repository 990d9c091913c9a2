"""The model card of a run: what the model is, how good, on whose images, and what it must not be used for; Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyclinic.files import read_result
from polyclinic.runner.calibration import Calibration
from polyclinic.runner.model_file import Card
from polyclinic.tasks import TASKS

#: characters that mean something in Markdown or HTML
SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&@:])")
#: what a result calls its model where there is one of each site
EACH_ITS_OWN = "one of each site"
LIMITS = (
    "It is a research model. Nobody has approved it as a medical device, and this card is no such approval.",
    "It was tested on images of the sites of this study, or of the same kind. Other scanners, other patients and other "
    "rates of disease can make it much worse: test it on your own patients first.",
    "A person who can judge the image decides. The model's figures are help, and not a diagnosis.",
    "The test figures say nothing about groups of patients that the test images hold few of.",
)
SITES_TOGETHER = "On the test images of all sites together"
USE = {
    "onnx": """```python
import onnxruntime
from preparation import prepare
session = onnxruntime.InferenceSession("model.onnx")
[predictions] = session.run(None, {"images": prepare("image.png")[None]})
```""",
    "torchscript": """```python
import torch
from preparation import prepare
model = torch.jit.load("model.ts")
predictions = model(torch.from_numpy(prepare("image.png")[None]))
```""",
    "monai-bundle": """In the folder of the bundle (`pip install monai fire pillow`):

```bash
python -m monai.bundle run --config_file configs/inference.json --meta_file configs/metadata.json \\
  --dataset_dir FOLDER_WITH_IMAGES --output_dir predictions
```

It writes `predictions/predictions.csv`.""",
}


def plain(text: object) -> str:
    """A text that somebody chose, as plain words in Markdown: one line, no markup, no control characters."""
    one_line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return SPECIAL.sub(r"\\\1", one_line)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table; cells are plain words."""
    lines = [head, ["---"] * len(head), *([plain(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def model_card(folder: Path, card: Card, file: str, to: str | None = None) -> str:
    """The card of the model of a run folder; `file` is what the model is called, and `to` the format it is in."""
    result = read_result(folder) if (folder / "result.json").is_file() else {}
    parts = [
        ["# Model card", *_what(card, result)],
        ["## Limits of use", *(f"- {sentence}" for sentence in LIMITS)],
        ["## How good it is", *_metrics(result)],
        ["## How sure it is", *_calibrations(card.calibrations)],
        ["## Training images", *_images(result)],
        ["## Privacy", *_privacy(result)],
        *([["## How to use it", USE[to]]] if to else []),
        ["## Identity", *_identity(card, result, file)],
    ]
    return "\n\n".join("\n".join([part[0], "", *part[1:]]) for part in parts) + "\n"


def _what(card: Card, result: Mapping[str, Any]) -> list[str]:
    name = card.task["name"]
    like = TASKS[name].like if name in TASKS else None  # a plug-in's task, where nobody has loaded the plug-in
    says = {
        "classification": f"says which of {len(card.classes)} classes an image belongs to",
        "regression": f"estimates a value in {plain(card.unit or 'the unit of the labels')}",
        "segmentation": "draws a mask in an image",
        None: f"does the task {plain(name)}",
    }[like]
    networks = ", ".join(dict.fromkeys(plain(name) for name in card.backbones.values()))
    rounds = f" in {result['rounds']} rounds" if "rounds" in result else ""
    lines = [
        f"A network ({networks}) that {says}. It was trained by the method {plain(card.method)}{rounds} over "
        f"{len(_counts(result)) or 'several'} sites.",
        "",
        f"Images go in as {card.size} x {card.size} pixels with {card.channels} channel(s).",
    ]
    if card.classes:
        lines += ["", *table(["number", "class"], enumerate(card.classes))]
    return lines


def _metrics(result: Mapping[str, Any]) -> list[str]:
    metrics = result.get("metrics", {})
    if not metrics.get("test"):
        return ["No test figures came with this model. Do not use it before it is tested."]
    known = metrics.get("intervals", {})
    intervals = known.get("pooled", {}) if known.get("split") == "test" else {}
    own = result.get("model") == EACH_ITS_OWN
    lines = _means(metrics["test"]) if own else _with_intervals(SITES_TOGETHER, metrics["test"], intervals, known)
    if own and intervals:  # they are not of the mean over the models
        values = {name: some.get("value") for name, some in intervals.items()}
        lines += ["", *_with_intervals("Each image by its own site's model", values, intervals, known)]
    names = list(metrics["test"])
    sites = [(site, *(_number(of_site.get(name)) for name in names)) for site, of_site in metrics["per_site"].items()]
    return [*lines, "", "Of each site:", "", *table(["site", *map(plain, names)], sites)]


def _means(values: Mapping[str, Any]) -> list[str]:
    rows = [(name, _number(value)) for name, value in values.items()]
    return [f"{SITES_TOGETHER}, the mean over the sites' models:", "", *table(["metric", "value"], rows)]


def _with_intervals(
    words: str, values: Mapping[str, Any], intervals: Mapping[str, Any], known: Mapping[str, Any]
) -> list[str]:
    rows = [(name, _number(value), _interval(intervals.get(name))) for name, value in values.items()]
    unit = f" (intervals: bootstrap by {plain(known['unit'])})" if intervals and "unit" in known else ""
    return [f"{words}{unit}:", "", *table(["metric", "value", "95 % interval"], rows)]


def _interval(found: Any) -> str:
    if isinstance(found, Mapping) and {"low", "high"} <= found.keys():
        return f"{_number(found['low'])} to {_number(found['high'])}"
    return "not computed"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def _calibrations(calibrations: Mapping[str, Calibration]) -> list[str]:
    if not calibrations:
        return ["Its probabilities and values were not calibrated: nothing says how often it is right when it is sure."]
    lines = [
        "Fitted on validation images, which may have chosen the released round as well. The promise of a set or an "
        "interval holds on average over patients like those of the validation images.",
        "",
    ]
    rows = [
        (
            site or "all sites",
            one.cases,
            one.temperature if one.temperature is not None else "-",
            "; ".join(f"{coverage}: {value:g}" for coverage, value in one.quantiles.items()) or "-",
            "; ".join(f"{specificity}: {value:g}" for specificity, value in one.thresholds.items()) or "-",
        )
        for site, one in calibrations.items()
    ]
    return lines + table(["model of", "cases", "temperature", "quantile by coverage", "threshold by specificity"], rows)


def _counts(result: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
    return result.get("data", {}).get("counts", {})


def _images(result: Mapping[str, Any]) -> list[str]:
    counts = _counts(result)
    if not counts:
        return ["Not known: there is no result.json beside the model."]
    splits = list(dict.fromkeys(split for of_site in counts.values() for split in of_site))
    rows = [(site, *(of_site.get(split, 0) for split in splits)) for site, of_site in counts.items()]
    return [f"Source: {plain(result['data']['source'])}.", "", *table(["site", *map(plain, splits)], rows)]


def _privacy(result: Mapping[str, Any]) -> list[str]:
    if "privacy" not in result:
        return ["Not known: there is no result.json beside the model."]
    found = result["privacy"]
    if not found:
        return ["Trained without differential privacy: no bound is proved for what it tells about a training image."]
    return [
        f"Differential privacy: epsilon {_number(found.get('epsilon'))} at delta {_number(found.get('delta'))} "
        f"({plain(found.get('accountant'))}), of the site that spent most.",
        "",
        f"- Covered: {_listed(found.get('covers'))}.",
        f"- Not covered: {_listed(found.get('does_not_cover'))}.",
    ]


def _listed(found: Any) -> str:
    names = [found] if isinstance(found, str) else list(found or ())
    return "; ".join(plain(name) for name in names) or "nothing"


def _identity(card: Card, result: Mapping[str, Any], file: str) -> list[str]:
    version = result.get("environment", {}).get("polyclinic", "not known")
    rows = [
        ("file", file),
        ("SHA-256 of the released weights", card.weights_sha256),
        ("method", card.method),
        ("seed", result.get("seed", "not known")),
        ("trained with polyclinic", version),
    ]
    return table(["what", "value"], rows)
