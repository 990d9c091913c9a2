"""`polyclinic study new` writes a commented study, or a paper's; `study check` says what is wrong with one;
`polyclinic start` does both, and trains: from a folder of images to a model and its report."""

import contextlib
import sys
from pathlib import Path

import typer

from polyclinic.cli.groups import group_of
from polyclinic.cli.run import SET, run
from polyclinic.errors import BadInput
from polyclinic.extras import need
from polyclinic.files import check_place

#: where a study with every setting says which images it is for
PLACEHOLDER = '"path/to/your/images"'

app = group_of("study", "Write and check studies.")


@app.command("new")
def new(
    path: Path = typer.Argument(Path("study.toml"), help="The file to write; - for stdout."),
    method: str | None = typer.Option(None, help="The method whose settings to write down.", show_default="fedavg"),
    source: str | None = typer.Option(
        None, help="The data source whose settings to write down.", show_default="fundus-phantom"
    ),
    partition: str | None = typer.Option(
        None, help="The partition whose settings to write down.", show_default="label-skew; iid for masks"
    ),
    task: str | None = typer.Option(None, help="The task; by default the first one the source is for."),
    images: Path | None = typer.Option(
        None,
        "--for",
        metavar="DIR",
        help="Your own images (a folder, a CSV or an npz file): look at them, and write a study that fits.",
    ),
    site: str = typer.Option(
        "", metavar="REGEX", help="With --for: finds the hospital in the names of files, such as '^([A-Z]+)_'."
    ),
    patient: str = typer.Option(
        "", metavar="REGEX", help="With --for: finds the patient in the names of files, such as '^(\\d+)_'."
    ),
    images_name: str = typer.Option(
        "", "--images", metavar="NAME", help="With --for: the array of the images, or the column of their paths."
    ),
    label: str = typer.Option("", metavar="NAME", help="With --for: the array, or the column, of the labels."),
    site_column: str = typer.Option("", metavar="NAME", help="With --for: the array, or the column, of the hospitals."),
    patient_column: str = typer.Option(
        "", metavar="NAME", help="With --for: the array, or the column, of the patients."
    ),
    plans: Path | None = typer.Option(
        None, metavar="FILE", help="With --for volumes: an nnUNetPlans.json to take patch, spacing and network from."
    ),
    preset: str | None = typer.Option(
        None, help="A paper's experiment with the paper's own settings, instead of the four above."
    ),
    scale: float = typer.Option(1.0, help="With --preset: divide images, rounds, epochs and widths by this number."),
    phantom: bool = typer.Option(False, "--phantom", help="With --preset: on drawn images instead of the paper's."),
    list_presets: bool = typer.Option(False, "--list-presets", help="Name the presets, and do nothing else."),
    force: bool = typer.Option(
        False, "--force", help="Write the study anew where the file exists; with --for its table of cases, too."
    ),
) -> None:
    """Write a study for your own images (--for), one with every setting and what it means, or a paper's (--preset)."""
    chosen = any(one is not None for one in (method, source, partition, task))
    hints = {"site": site, "patient": patient, "images": images_name, "label": label}
    hints |= {"site_column": site_column, "patient_column": patient_column}
    if images is not None:
        if chosen or preset is not None or phantom or scale != 1 or list_presets:
            raise BadInput("--for: what lies there decides; leave the other flags out, and change the study it writes")
        write_for(images, path, hints, force=force, plans=plans)
        typer.echo(f"wrote {path}; check it, and whether its images can be read, with: polyclinic study check {path}")
        typer.echo(f"then run it with: polyclinic run {path}")
        return
    if plans is not None:
        raise BadInput("--plans: goes with --for a folder of volumes; give both")
    if given := [flag for flag, value in hints.items() if value]:
        written = "sites" if given[0] == "site" else f"data.{given[0].removesuffix('_column')}"
        raise BadInput(f"--{given[0].replace('_', '-')}: goes with --for; without it write {written} into the study")
    from polyclinic.study.preset import preset as preset_text
    from polyclinic.study.preset import preset_names, summary_of

    if list_presets:
        for name in preset_names():
            typer.echo(f"{name:<12}  {summary_of(name)}")
        return
    if preset is None and (phantom or scale != 1):
        raise BadInput("--scale and --phantom go with --preset; `polyclinic study new --list-presets` names them")
    if preset is not None and chosen:
        raise BadInput("--preset: has a method, a source, a partition and a task of its own; leave these flags out")
    if preset is not None:
        text = preset_text(preset, scale=scale, phantom=phantom).replace("STUDY", str(path))
    else:
        from polyclinic.study.template import first_task, template

        source = source or "fundus-phantom"
        # masks have no labels by which sites could differ
        usual = "iid" if (task or first_task(source)).endswith("segmentation") else "label-skew"
        text = template(method=method or "fedavg", source=source, partition=partition or usual, task=task)
    write_new(path, text, force=force)


def write_for(
    images: Path, path: Path, hints: dict[str, str], *, force: bool = False, plans: Path | None = None
) -> None:
    """Look at somebody's images, and write a study for them."""
    from polyclinic.data.survey_study import Hints, study_for
    from polyclinic.study.for_volumes import volume_study_for

    if str(path) == "-":
        raise BadInput("--for: paths in the study begin at its folder, so it must be a file; name one instead of -")
    refuse_existing(path, force=force)
    found = None if any(hints.values()) else volume_study_for(images, path, plans)
    if plans is not None and found is None:
        raise BadInput("--plans: goes with --for a folder of volumes with masks, and nothing else; leave it out")
    text, said = found or study_for(images, path, Hints(**hints), force=force)
    for sentence in said:
        typer.echo(sentence)
    refuse_existing(path, force=force)
    path.write_text(text, encoding="utf-8")


def refuse_existing(path: Path, *, force: bool = False) -> None:
    """BadInput if there is a file already that may not be written anew, or no folder for one."""
    check_place(path, flag="")
    if path.exists() and not (force and path.is_file()):
        raise BadInput(f"{path}: exists already; name another file, or write it anew with --force")
    if not path.parent.is_dir():
        raise BadInput(f"{path}: there is no folder {path.parent}; make it first")


def write_new(path: Path, text: str, *, force: bool = False) -> None:
    """Write a new study, or print it where the path is `-`; BadInput if there is a file already."""
    if str(path) == "-":
        typer.echo(text)
        return
    refuse_existing(path, force=force)
    path.write_text(text, encoding="utf-8")
    if PLACEHOLDER in text:
        typer.echo(f"wrote {path}; write where your images are into data.path, then: polyclinic study check {path}")
        typer.echo("to begin with: docs/data.md; one that fits your images: polyclinic study new --for DIR")
    else:
        typer.echo(f"wrote {path}; run it with: polyclinic run {path}")


@app.command("check")
def check(
    path: Path = typer.Argument(..., help="The study, a TOML file."),
    sets: list[str] = SET,
    images: bool = typer.Option(True, help="Read the images as well; --no-images where they are on another machine."),
) -> None:
    """Say whether a study can run, without running it: its settings, and whether its images can be read.

    Of more than 1,000 images, 1,000 are read.
    """
    for sentence in check_sentences(path, sets, images=images):
        typer.echo(sentence)


def check_sentences(path: Path, sets: list[str], *, images: bool) -> list[str]:
    """Sentences about a study that can run."""
    from polyclinic.data.source import AT_SITES
    from polyclinic.runner.run.data_check import check_files, check_images, data_hints, left_out
    from polyclinic.runner.run.volume_memory import memory_sentence
    from polyclinic.study import load_study
    from polyclinic.study.unused import notice_ignored

    study = load_study(path, sets)
    if study.task.like == "segmentation":
        need("monai", f"task.name: '{study.task.name}'")
    notice_ignored(study)
    if study.tuning is not None and study.data.source not in AT_SITES:
        study.tuning.check_weights()
    looked_at = check_images(study.data) if images else []
    more = [*left_out(study), *data_hints(study.data, study.sites)] if images else []
    found = [*check_files(study), *looked_at, *more]
    sites = len(study.sites.site_names()) or "as many as the data has"
    what = f"{study.method.name} for {study.task.name} on {study.data.source}"
    fine = f"{path}: fine. {what}, sites: {sites}, rounds: {study.method.rounds}"
    if study.data.source in AT_SITES:
        from polyclinic.deployment.kits import foreseen_refusals

        found += foreseen_refusals(study, Path("deployment"))
    return [fine, *found, *filter(None, [memory_sentence(study)])]


def start(
    images: Path = typer.Argument(..., metavar="FOLDER", help="Your images: a folder, a CSV or an npz file."),
    out: Path | None = typer.Option(
        None, help="The folder for study, model and report.  [default: runs/<name of the images>]", show_default=False
    ),
    yes: bool = typer.Option(False, "--yes", help="Train without a question."),
) -> None:
    """Look at your images, write a study for them, check it, train, and write a report.

    The same as study new --for, study check, run and report. A study that is there already is taken as it is.
    """
    folder = out or Path("runs") / (images.resolve().stem or "images")
    study, trained = folder / "study.toml", folder / "run"
    if (trained / "result.json").is_file():
        raise BadInput(f"{trained}: holds a run that has ended; see its report.html, or name another folder with --out")
    if not study.is_file():
        check_place(study)
        made = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write_for(images, study, {})
        except BaseException:
            with contextlib.suppress(OSError):  # it holds something
                for one in made:
                    one.rmdir()
            raise
    for sentence in check_sentences(study, [], images=True):
        typer.echo(sentence)
    if not yes and sys.stdin.isatty() and not typer.confirm("Train with this study now?", default=True):
        typer.echo(f"change {study} as you like, then again: polyclinic start {images} --out {folder}")
        return
    begun = (trained / "study.toml").exists()
    run(study, [], trained, resume=begun, engine=None, address=None, report=True, quiet=False, as_json=False)
    typer.echo(f"new images: polyclinic predict {trained} IMAGES")
