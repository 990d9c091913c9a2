"""Questions to deployed sites, which train nothing or little: `polyclinic deploy evaluate`, `inspect` and `worth`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyclinic.cli.deploy import FOLDER, WITHIN, app, show_result, study_to_send, with_digest_of_weights
from polyclinic.cli.run import SET
from polyclinic.errors import BadInput
from polyclinic.json_types import JsonObject

if TYPE_CHECKING:
    from polyclinic.study import Study


@app.command("evaluate")
def evaluate(
    model: Path = typer.Argument(..., help="The model: weights of the study's network (model.safetensors of a run)."),
    study: Path = typer.Option(..., "--study", help="The study whose sites score it."),
    sets: list[str] = SET,
    folder: Path = FOLDER,
    by: list[str] = typer.Option([], "--by", help="Figures of sub-groups: a column of the sites' images."),
    against: Path | None = typer.Option(
        None, help="A second model.safetensors: paired tests of the two on the same patients.", show_default=False
    ),
    name: str = typer.Option("evaluate", help="Name of the run."),
    out: Path | None = typer.Option(None, help="Fetch the run into this folder when it is done.", show_default=False),
    within: float = WITHIN,
) -> None:
    """Have the sites score a model on their own test images; nothing is trained, and only scores leave."""
    from polyclinic.runner.evaluate.inspect import as_question

    if model.suffix in (".onnx", ".ts") or model.is_dir():
        raise BadInput(
            f"MODEL {model}: a deployed site runs no code that comes with a study; name weights of the study's network "
            "(model.safetensors), or have the site install the network as a plug-in"
        )
    if not model.is_file():
        raise BadInput(f"MODEL {model}: there is no such file")
    more = {} if against is None else second_model_of(model, against)
    sent = study_to_send(study, sets, folder)
    asked = as_question(sent, "evaluate", model__weights=str(model), method__by=list(by), **more)
    send_question(with_digest_of_weights(asked), name, folder, out, within)


@app.command("worth")
def worth(
    study: Path = typer.Argument(..., help="A study of the method analytic, whose sums are open."),
    sets: list[str] = SET,
    folder: Path = FOLDER,
    name: str = typer.Option("worth", help="Name of the run."),
    out: Path | None = typer.Option(None, help="Fetch the run into this folder when it is done.", show_default=False),
    within: float = WITHIN,
) -> None:
    """Train the study's head in one round, and say what each site adds to it: leave-one-out and Shapley values."""
    from polyclinic.cli.worth import show_worth

    sent = study_to_send(study, sets, folder)
    if sent.method.name != "analytic":
        raise BadInput(
            f"method.name: at deployed sites worth follows from the sums of 'analytic', and '{sent.method.name}' would "
            "be trained again for each coalition; set method.name = 'analytic', or simulate it with `polyclinic worth`"
        )
    asked = sent.with_settings({"method.worth": True})
    show_worth(send_question(asked, name, folder, out, within)["worth"])


@app.command("inspect")
def inspect(
    study: Path = typer.Argument(..., help="The study that the sites would train."),
    sets: list[str] = SET,
    folder: Path = FOLDER,
    name: str = typer.Option("inspect", help="Name of the run."),
    picture: Path | None = typer.Option(None, help="Draw what was told into this file.", show_default=False),
    within: float = WITHIN,
) -> None:
    """Ask the sites for counts of images, patients and labels, and say what follows for the choice of a method."""
    from polyclinic.cli.tables import show_inspection
    from polyclinic.runner.evaluate.inspect import inspection_of

    result = send_question(inspection_of(study_to_send(study, sets, folder)), name, folder, None, within)
    show_inspection(result["inspect"], study.stem, picture)


def send_question(asked: Study, name: str, folder: Path, out: Path | None, within: float) -> JsonObject:
    """Submit a study that trains nothing, and wait for its result."""
    from polyclinic.cli.display import RunDisplay
    from polyclinic.deployment.admin import Administration, Submission, Watch

    submission, display = Submission(asked, name, False), RunDisplay()
    with Administration(folder, within) as administration:
        job = administration.submit(submission)
        try:
            result = Watch(administration, display, typer.echo).run(submission, job)
        finally:
            display.close()
        if asked.method.name != "inspect":
            show_result(name, result, administration, out)
    return result


def second_model_of(model: Path, against: Path) -> dict[str, str]:
    """The settings that name a second model, to compare the first one with; BadInput unless they are of one network."""
    from polyclinic.models import read_weights
    from polyclinic.questions.evaluate import second_model

    parcel = second_model(str(against), read_weights(model, "MODEL").tensors)
    return {"method__against": str(against), "method__against_digest": parcel.digest}
