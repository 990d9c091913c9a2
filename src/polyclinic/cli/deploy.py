"""`polyclinic deploy`: a study across institutions, or all of them on this machine for a rehearsal."""

import contextlib
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyclinic.cli.groups import group_of
from polyclinic.cli.run import SET
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.files import check_place
from polyclinic.json_types import JsonObject

if TYPE_CHECKING:
    from polyclinic.deployment.admin import Administration, Submission
    from polyclinic.study import Study

app = group_of("deploy", "Run studies across institutions (NVFlare).")

FOLDER = typer.Option(Path("deployment"), "--deployment", "-d", help="The folder that `deploy init` wrote.")
WITHIN = typer.Option(30.0, help="Seconds for the server to answer.")
OUT = typer.Option(None, help="Fetch the run into this folder when it is done.", show_default=False)
REHEARSAL = """allow more than the kits of real sites do. They approve every study by themselves, let out every kind of
parcel but real images, and take studies with any number of images (local/policy.toml)"""
NAMES = typer.Argument(None, help="Participants: server, or a site's name; all of them if none is named.")


@app.command("init")
def init(
    study: Path = typer.Argument(..., help="The study whose sites take part."),
    sets: list[str] = SET,
    out: Path = typer.Option("deployment", "--deployment", "-d", "--out", help="The folder to write the kits into."),
    server: str = typer.Option("localhost", help="Name under which the sites reach the coordinator's machine."),
    port: int = typer.Option(8002, help="The one port that must be open at the coordinator's machine."),
) -> None:
    """Invite the sites of a study. Of a study with images of its own: make all kits here, for a rehearsal."""
    from polyclinic.cli.display import RunDisplay
    from polyclinic.data.source import AtSites
    from polyclinic.deployment.joining import INVITATION, invite
    from polyclinic.deployment.kits import rehearse
    from polyclinic.engines.nvflare.job import refuse_missing
    from polyclinic.files import atomic_write
    from polyclinic.study import load_study

    refuse_missing()
    check_place(out)
    wanted = load_study(study, sets)
    if isinstance(wanted.data, AtSites):
        names = wanted.sites.site_names()
        if out.exists() and any(out.iterdir()) and not (out / INVITATION).exists():
            raise BadInput(f"--out {out}: is not empty; name a new folder")
        invite(out, names, wanted.data.dataset, server, port)
        atomic_write(out / "study.toml", wanted.to_toml())
        typer.echo(f"wrote {out}: kits of the server and the admin; no key of a site is here, and none ever comes here")
        typer.echo(f"send {out / INVITATION} to {', '.join(names)}: `polyclinic site join invitation.json NAME`")
        typer.echo("draws a site's keys there, and writes the request that you take with `polyclinic deploy admit`")
        return
    with contextlib.closing(RunDisplay()) as display:
        names = rehearse(wanted, out, server=server, port=port, display=display)
    typer.echo(f"wrote {out}: kits of the server, the admin and {len(names)} sites ({', '.join(names)})")
    typer.echo("a rehearsal: the keys of all were drawn here, so use it with no hospital's images")
    typer.echo(f"the study as it will be sent: {out / 'study.toml'}")


@app.command("admit")
def admit(
    requests: list[Path] = typer.Argument(None, help="NAME.request.json, as each site sent it.", show_default=False),
    folder: Path = FOLDER,
) -> None:
    """Take the requests of sites, and write the admission of all whose requests were taken so far."""
    from polyclinic.deployment import joining
    from polyclinic.engines.nvflare.job import refuse_missing

    refuse_missing()
    before = joining.admitted(folder)
    made = joining.admit(folder, requests or [])
    typer.echo(f"{len(made.roster.sites)} sites take part: {', '.join(sorted(made.roster.sites))}")
    for name, keys in made.roster.sites.items():
        if before.get(name, keys) != keys:
            typer.echo(f"{name}: NEW KEYS; ask its people by telephone whether this request is theirs")
    typer.echo(f"send {folder / joining.ADMISSION} to all of them, and start the server again; it has new keys of all")
    typer.echo("each site runs `polyclinic site confirm admission.json`, and its people call those of the next site")
    if len(made.roster.sites) == 1:
        typer.echo(f"they call you; the words: {made.roster.words}")


@app.command("start")
def start(
    kit: Path = typer.Argument(..., help="The kit of a server or site, as its institution got it."),
    verbose: bool = typer.Option(False, "--verbose", help="Print what NVFlare says, instead of writing it to a file."),
) -> None:
    """Start one participant here, in the foreground, until Ctrl-C or the end of this process."""
    from polyclinic.deployment.confirmation import confirmation_of
    from polyclinic.deployment.processes import Participant
    from polyclinic.engines.nvflare.job import end_tree

    participant = Participant.of(kit)
    if confirmation_of(participant.kit).rehearsal:
        typer.echo(f"{kit} is of a rehearsal: others have its keys, so use it with no patient's images", err=True)
    log = participant.kit / "console.log"
    with contextlib.nullcontext() if verbose else log.open("ab") as output:
        process = participant.start(output, alone=False)
    typer.echo(f"{participant.name} runs here; Ctrl-C ends it" + ("" if verbose else f"; NVFlare's own words: {log}"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager ends it so
    try:
        code = process.wait()
    except KeyboardInterrupt:
        code = 0
    finally:
        end_tree(process.pid)
    if code:
        typer.echo(f"{participant.name} ended with exit code {code}; {log} says why", err=True)
    raise typer.Exit(code)


@app.command("up")
def up(
    names: list[str] = NAMES,
    here: bool = typer.Option(False, "--here", help="Start them on this machine: a rehearsal."),
    folder: Path = FOLDER,
    within: float = typer.Option(120.0, help="Seconds for server and sites to be up."),
) -> None:
    """Start a server and all sites on this machine, each in a process of its own."""
    from polyclinic.deployment.admin import Administration
    from polyclinic.deployment.processes import Rehearsal

    if not here:
        raise BadInput("--here: only a rehearsal starts everybody; an institution runs `polyclinic deploy start KIT`")
    rehearsal = Rehearsal(folder)
    started = rehearsal.up(names or [])
    typer.echo(f"started {', '.join(started)}" if started else "all of them are running")
    if free := rehearsal.approving_every_study():
        typer.echo(f"a rehearsal: {', '.join(free)} {' '.join(REHEARSAL.split())}")
    rehearsal.wait_until_up(within)
    names, until = [name for name in rehearsal.running() if name != "server"], time.monotonic() + within
    with Administration(folder) as administration:
        while (missing := set(names) - set(administration.connected())) and time.monotonic() < until:
            time.sleep(1)
    if missing:
        late = ", ".join(sorted(missing))
        raise WorkFailed(f"{late}: not connected within {within:g} seconds (--within); `deploy logs` may say why")
    typer.echo(f"connected: {', '.join(sorted(names)) or 'no site'}")


@app.command("submit")
def submit(
    study: Path = typer.Argument(..., help="The study to run."),
    sets: list[str] = SET,
    folder: Path = FOLDER,
    name: str | None = typer.Option(None, help="Name of the run.  [default: <method>-seed<seed>]", show_default=False),
    resume: bool = typer.Option(False, "--resume", help="Continue the run of this name after its last checkpoint."),
    detach: bool = typer.Option(False, "--detach", help="Do not wait; sites that come back then need --resume."),
    out: Path | None = OUT,
    within: float = WITHIN,
) -> None:
    """Run a study at the sites, and watch over it until it is done."""
    from polyclinic.deployment.admin import Administration, Submission, study_to_send
    from polyclinic.deployment.kits import foreseen_refusals
    from polyclinic.deployment.study_in_words import traffic_in_words

    if out:
        check_place(out)
    chosen = study_to_send(study, sets, folder)
    submission = Submission(chosen, name or f"{chosen.method.name}-seed{chosen.seed}", resume)
    typer.echo(traffic_in_words(chosen))
    for sentence in foreseen_refusals(chosen, folder):
        typer.echo(sentence, err=True)
    with Administration(folder, within) as administration:
        job = administration.submit(submission)
        typer.echo(f"submitted '{submission.name}' as job {job}")
        if detach:
            return
        try:
            result = watch(administration, submission, job)
        except KeyboardInterrupt:
            typer.echo("the run goes on; `polyclinic deploy status` shows it, `polyclinic deploy fetch` fetches it")
            raise typer.Exit(1) from None
        except WorkFailed as error:
            kept = f"finished rounds are kept, add --resume to continue '{submission.name}'"
            raise WorkFailed(f"{error}; {kept}") from None
        show_result(submission.name, result, administration, out)


@app.command("status")
def status(folder: Path = FOLDER, within: float = WITHIN) -> None:
    """Show who is connected, who is lost, and how far every run is."""
    from polyclinic.deployment.admin import SILENT, Administration, describe

    with Administration(folder, within) as administration:
        silences = administration.silences(patient=True)
        there = sorted(site for site, silence in silences.items() if silence < SILENT)
        typer.echo(f"connected: {', '.join(there) or 'no site'}")
        for site in sorted(set(silences) - set(there)):
            typer.echo(f"lost: {site}, not heard of for {silences[site]:.0f} seconds")
        for job in administration.jobs():
            typer.echo(describe(job, administration))


@app.command("logs")
def logs(
    name: str = typer.Argument("server", help="server, or the name of a site whose kit is on this machine."),
    lines: int = typer.Option(40, help="How many lines of the end to show."),
    folder: Path = FOLDER,
) -> None:
    """Show the end of a participant's log. A site's log stays at the site: ask there."""
    kit = folder / ("server" if name == "server" else f"sites/{name}")
    if not (kit / "log.txt").exists():
        raise BadInput(f"{name}: there is no {kit / 'log.txt'}; has it been started here?")
    of_jobs = sorted(kit.glob("*/log.txt"), key=lambda path: path.stat().st_mtime)
    for path in (kit / "log.txt", *of_jobs[-1:]):
        typer.echo(f"== {path}")
        typer.echo("\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]))


@app.command("fetch")
def fetch(
    job: str | None = typer.Argument(None, help="The job whose run to fetch; by default the latest."),
    out: Path = typer.Option(..., help="The folder to put it into."),
    folder: Path = FOLDER,
    within: float = WITHIN,
) -> None:
    """Fetch the folder of a run: model, result, history."""
    from polyclinic.cli.tables import print_result
    from polyclinic.deployment.admin import Administration
    from polyclinic.runner.run.result import Result

    check_place(out)
    if out.exists():
        raise BadInput(f"--out {out}: exists already; name a new folder")
    with Administration(folder, within) as administration:
        jobs = administration.jobs()
        if job is None and not jobs:
            raise BadInput("there is no job yet; `polyclinic deploy submit` makes one")
        administration.fetch(job or jobs[0]["job_id"], out)
    if (out / "result.json").is_file():
        print_result(Result.open(out))
    typer.echo(f"wrote {out}")


@app.command("stop")
def stop(
    job: str | None = typer.Argument(None, help="The job to stop; by default the latest."),
    now: bool = typer.Option(False, "--now", help="Do not wait for the end of the round; it will be done again."),
    folder: Path = FOLDER,
    within: float = WITHIN,
) -> None:
    """Stop a run that was submitted; `deploy submit --resume` continues it."""
    from polyclinic.deployment.admin import Administration

    with Administration(folder, within) as administration:
        jobs = {one["job_id"]: one["status"] for one in administration.jobs()}
        if not jobs:
            raise BadInput("there is no job to stop; `polyclinic deploy submit` makes one")
        chosen = job or next(iter(jobs))
        if chosen not in jobs:
            raise BadInput(f"{chosen}: there is no such job; `polyclinic deploy status` lists them")
        if jobs[chosen].startswith("FINISHED"):
            raise BadInput(f"{chosen}: has ended already; `polyclinic deploy fetch` fetches what it left")
        at_once = administration.stop(chosen, now=now)
    when = "was stopped" if at_once else "stops after the round it is in"
    typer.echo(f"job {chosen} {when}; add --resume to `polyclinic deploy submit` to continue its run")


@app.command("revoke-site")
def revoke_site(
    site: str = typer.Argument(..., help="The site whose kit was stolen, or which has left for good."),
    folder: Path = FOLDER,
    within: float = WITHIN,
) -> None:
    """Refuse a site at the server for good, and stop the runs that it may be part of."""
    from polyclinic.deployment.admin import Administration

    request = folder / "requests" / f"{site}.json"
    if not request.is_file():
        raise BadInput(f"{site}: {folder} has admitted no site of this name")
    with Administration(folder, within) as administration:
        stopped = administration.revoke_site(site)
    typer.echo(f"{site}: the server refuses this site from now on, also after a restart")
    for job in stopped:
        typer.echo(f"job {job} was stopped; a study without {site} goes on under another name (--name)")
    request.rename(request.with_suffix(".revoked"))
    typer.echo(f"`polyclinic deploy admit` writes an admission without {site}, for the others to confirm")
    typer.echo(f"until then their people run `polyclinic site distrust {site}`; its certificate ends after a year")


@app.command("down")
def down(names: list[str] = NAMES, folder: Path = FOLDER) -> None:
    """End the participants of a rehearsal, and everything they started."""
    from polyclinic.deployment.processes import Rehearsal

    ended = Rehearsal(folder).down(names or [])
    typer.echo(f"ended {', '.join(ended)}" if ended else "none of them was running")


# --- questions to sites, which train nothing or little -------------------------------------------------


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
    out: Path | None = OUT,
    within: float = WITHIN,
) -> None:
    """Have the sites score a model on their own test images; nothing is trained, and only scores leave."""
    from polyclinic.deployment.admin import study_to_send, with_digest_of_weights
    from polyclinic.models import read_weights
    from polyclinic.questions.evaluate import second_model
    from polyclinic.runner.evaluate.inspect import as_question

    if model.suffix in (".onnx", ".ts") or model.is_dir():
        cure = "name weights of the study's network (model.safetensors), or have the site install it as a plug-in"
        raise BadInput(f"MODEL {model}: a deployed site runs no code that comes with a study; {cure}")
    if not model.is_file():
        raise BadInput(f"MODEL {model}: there is no such file")
    more = {}
    if against is not None:  # BadInput unless both are of one network
        parcel = second_model(str(against), read_weights(model, "MODEL").tensors)
        more = {"method__against": str(against), "method__against_digest": parcel.digest}
    sent = study_to_send(study, sets, folder)
    asked = as_question(sent, "evaluate", model__weights=str(model), method__by=list(by), **more)
    send_question(with_digest_of_weights(asked), name, folder, out, within)


@app.command("worth")
def worth(
    study: Path = typer.Argument(..., help="A study of the method analytic, whose sums are open."),
    sets: list[str] = SET,
    folder: Path = FOLDER,
    name: str = typer.Option("worth", help="Name of the run."),
    out: Path | None = OUT,
    within: float = WITHIN,
) -> None:
    """Train the study's head in one round, and say what each site adds to it: leave-one-out and Shapley values."""
    from polyclinic.cli.evaluate import show_worth
    from polyclinic.deployment.admin import study_to_send
    from polyclinic.runner.evaluate.inspect import question_of_worth

    asked = question_of_worth(study_to_send(study, sets, folder))
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
    from polyclinic.deployment.admin import study_to_send
    from polyclinic.runner.evaluate.inspect import inspection_of

    result = send_question(inspection_of(study_to_send(study, sets, folder)), name, folder, None, within)
    show_inspection(result["inspect"], study.stem, picture)


def send_question(asked: "Study", name: str, folder: Path, out: Path | None, within: float) -> JsonObject:
    """Submit a study that trains nothing, and wait for its result."""
    from polyclinic.deployment.admin import Administration, Submission

    submission = Submission(asked, name, False)
    with Administration(folder, within) as administration:
        result = watch(administration, submission, administration.submit(submission))
        if asked.method.name != "inspect":
            show_result(name, result, administration, out)
    return result


def watch(administration: "Administration", submission: "Submission", job: str) -> JsonObject:
    """Wait for the result of a job, and show how far it is."""
    from polyclinic.cli.display import RunDisplay
    from polyclinic.deployment.admin import Watch

    with contextlib.closing(RunDisplay()) as display:
        return Watch(administration, display, typer.echo).run(submission, job)


def show_result(name: str, result: JsonObject, administration: "Administration", out: Path | None) -> None:
    from polyclinic.cli.tables import print_result
    from polyclinic.runner.run.result import Result

    if out:
        administration.fetch(administration.jobs()[0]["job_id"], out)
    print_result(Result(out or Path(name), result))
