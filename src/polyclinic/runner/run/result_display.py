"""A result as a notebook shows it: its history as a table, its curves as a picture, its figures as a small page."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from polyclinic.errors import Damaged
from polyclinic.extras import need
from polyclinic.json_types import JsonMapping, JsonObject, parse_json
from polyclinic.palette import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def history_rows(file: Path) -> list[JsonObject]:
    """A flat row for each round: `validation_auc` is of all sites together, `validation_auc/site-1` of one."""
    rows = []
    for number, text in enumerate(file.read_bytes().split(b"\n") if file.exists() else [], 1):
        try:
            if not text:
                continue
            line = parse_json(text)
            row = {name: line[name] for name in ("round", "seconds", "total_bytes")}
            scores = line["validation"] or {}
            row |= {f"validation_{name}": value for name, value in scores.get("pooled", {}).items()}
            for site, found in scores.get("per_site", {}).items():
                row |= {f"validation_{name}/{site}": value for name, value in found.items()}
            rows.append({**row, "failed": ", ".join(sorted(line["failed"]))})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Damaged(f"{file}, line {number}: is damaged; bring the file back from a copy") from None
    return rows


# --- the picture --------------------------------------------------------------------------------------


def draw(values: JsonMapping, rows: list[JsonObject], metric: str, unit: str = "") -> "Figure":
    """Two panels: the metric on validation images by round, and that of the released model on test images by site."""
    need("matplotlib", "plot()")
    from matplotlib.figure import Figure

    curves = any(f"validation_{metric}" in row for row in rows)
    figure = Figure(figsize=(11 if curves else 5.5, 4), layout="constrained")
    panels = figure.subplots(1, 2 if curves else 1, squeeze=False)[0]
    label = f"{metric} ({unit})" if unit else metric
    if curves:
        _draw_curves(panels[0], rows, metric, label)
    _draw_sites(panels[-1], values, metric, label)
    figure.suptitle(f"{values['method']}, seed {values['seed']}, {values['rounds']} rounds")
    return figure


def _draw_curves(axes: "Axes", rows: list[JsonObject], metric: str, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    name = f"validation_{metric}"
    columns = [name, *dict.fromkeys(key for row in rows for key in row if key.startswith(f"{name}/"))]
    for place, column in enumerate(columns):
        points = [(row["round"], row[column]) for row in rows if row.get(column) is not None]
        site = column.partition("/")[2] or "all sites together"
        rounds, values = zip(*points, strict=True)
        axes.plot(rounds, values, marker="o", markersize=3, label=site, **LIGHT.line(place))
    axes.set(title="Validation images, by round", xlabel="round", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")


def _draw_sites(axes: "Axes", values: JsonMapping, metric: str, label: str) -> None:
    images, whole, per_site = final_scores(values)
    counts = values.get("data", {}).get("counts", {})
    bars = {"all sites\ntogether": whole.get(metric), **{site: found.get(metric) for site, found in per_site.items()}}
    known = {name: value for name, value in bars.items() if value is not None}
    names = [f"{name}\n{counts[name][images]} images" if images in counts.get(name, {}) else name for name in known]
    colours = [LIGHT.colour(0), *[LIGHT.colour(5)] * (len(known) - 1)]
    drawn = axes.bar(range(len(known)), list(known.values()), color=colours)
    axes.bar_label(drawn, fmt="%.3g")
    axes.set(title=f"The released model on {images} images", ylabel=label)
    axes.set_xticks(range(len(known)), names, rotation=0 if len(known) < 6 else 90)


def final_scores(values: JsonMapping) -> tuple[str, JsonMapping, JsonMapping]:
    """Which images the released model was scored on; its metrics on all of them, and on those of each site."""
    metrics = values["metrics"]
    if scored := metrics.get("validation"):
        return "validation", scored["pooled"], scored.get("per_site", {})
    return "test", metrics["test"], metrics.get("per_site", {})


#: images of a site, below which one of them decides its figures
FEW_IMAGES = 10


def image_counts(values: JsonMapping, images: str) -> dict[str, int]:
    """How many test (or validation) images each site has; empty where sites keep it to themselves."""
    counts = values.get("data", {}).get("counts", {})
    return {site: int(of_site[images]) for site, of_site in counts.items() if images in of_site}


def few_images(counts: dict[str, int], sites: Iterable[str]) -> str:
    """A sentence that names sites whose figures rest on few images, or that have none; empty where there are none."""
    scored = list(sites)
    few = [f"{site} ({counts[site]})" for site in scored if counts.get(site, FEW_IMAGES) < FEW_IMAGES]
    none = [site for site, count in counts.items() if not count and site not in scored]
    words = []
    if few:
        decides = "one image decides such figures, and moves the mean over sites"
        words.append(f"fewer than {FEW_IMAGES} images at {_named(few)}: {decides}")
    if none:
        words.append(f"no row for {_named(none)}: none of these images is theirs")
    return "; ".join(words)


def _named(sites: list[str]) -> str:
    return ", ".join(sites[:5]) + (f" and {len(sites) - 5} more sites" if len(sites) > 5 else "")


# --- the page of a notebook ---------------------------------------------------------------------------


def as_html(values: JsonMapping, folder: Path) -> str:
    """What a notebook shows of a result."""
    from polyclinic.templates import render  # here: a terminal needs no page

    images, whole, per_site = final_scores(values)
    size = values["communication"]["total_bytes"]
    title = f"{values['method']}, seed {values['seed']}: the released model on {images} images"
    privacy = values.get("privacy")
    spent = (
        f"epsilon {privacy['epsilon']:.4g} at delta {privacy['delta']:.3g}" if privacy else "no differential privacy"
    )
    facts = f"{values['rounds']} rounds; {size:,} bytes carried; {spent}; {folder}"
    rows = [("all sites together", whole), *per_site.items()]
    return render("result.html", title=title, facts=facts, names=list(whole), rows=rows)
