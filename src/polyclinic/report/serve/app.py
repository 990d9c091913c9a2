"""The web application of a folder of runs. Every answer is JSON but for the page itself and the files it links to."""

import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, StringConstraints
from starlette.exceptions import HTTPException

from polyclinic import __version__
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.json_types import JsonObject
from polyclinic.report.serve import places
from polyclinic.report.serve.jobs import Jobs
from polyclinic.report.serve.places import files_of, is_run_folder, is_study, listing
from polyclinic.report.serve.run_files import RunFiles, plain, read_json, table
from polyclinic.report.serve.server import Access, App, Guard
from polyclinic.templates import render

STATIC = Path(__file__).with_name("static")
#: files that a page fetches, and how they are sent; nothing in them is about the folder, so that no token is needed
SCRIPTS = ("shared", "charts", "folder", "site")
FILES = {"/icon.svg": "image/svg+xml", **{f"/{name}.js": "text/javascript" for name in SCRIPTS}}
OPEN = ("/", "/style.css", *FILES)
#: for a report, a page without scripts, which reaches neither this server nor any other
SANDBOX = (
    "sandbox allow-downloads; default-src 'none'; "
    "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; frame-ancestors 'none'"
)
#: runs that are shown side by side at once
MOST_COMPARED = 20
Name = Annotated[str, StringConstraints(max_length=places.LONGEST_NAME)]


class Asked(BaseModel):
    """The content of a request: the fields that are named, and no others."""

    model_config = ConfigDict(extra="forbid")


class Named(Asked):
    """A run, a comparison or a study file by its name."""

    name: Name


class Start(Asked):
    """A study to run, and what its run shall be called."""

    study: Name
    name: Annotated[str, StringConstraints(max_length=100)] | None = None


def folder_app(folder: Path, access: Access, jobs: Jobs) -> App:
    """The application, behind its guard."""
    app, view = bare_app("runs", "/folder.js"), FolderView(folder, access, jobs)
    for answer in (view.overview, view.run, view.comparison, view.compare):
        app.get(f"/api/{answer.__name__}")(answer)
    for act in (view.start, view.stop, view.resume, view.report):
        app.post(f"/api/{act.__name__}")(act)
    app.get("/files/{name:path}")(view.file)
    return Guard(app, access, OPEN)


def bare_app(title: str, script: str) -> FastAPI:
    """An application that has its page and says what went wrong in one sentence."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(BadInput, _say(400))
    app.add_exception_handler(places.Outside, _say(404))
    app.add_exception_handler(WorkFailed, _say(409))
    app.add_exception_handler(RequestValidationError, _say(400, "the request has not the fields that it must have"))
    app.add_exception_handler(HTTPException, _say_status)
    app.add_exception_handler(Exception, _say(500, "the server failed; its terminal says why"))
    page, style = render("serve.html", title=title, script=script), render("serve.css")
    app.get("/", response_model=None)(lambda: Response(page, media_type="text/html"))
    app.get("/style.css", response_model=None)(lambda: Response(style, media_type="text/css"))
    for path, kind in FILES.items():
        app.get(path, response_model=None)(_static(path[1:], kind))
    return app


def _static(name: str, kind: str) -> Any:
    return lambda: FileResponse(STATIC / name, media_type=kind)


def _say(status: int, words: str = "") -> Any:
    return lambda _request, error: JSONResponse({"error": words or str(error)}, status)


def _say_status(_request: Any, error: Any) -> Response:
    words = "there is no such page" if error.status_code == 404 else "refused"
    return JSONResponse({"error": words}, error.status_code)


@dataclass(frozen=True)
class FolderView:
    """Answers to the page of a folder."""

    folder: Path
    access: Access
    jobs: Jobs

    def overview(self) -> Any:
        """Everything in the folder."""
        found, started = listing(self.folder), self.jobs.facts()
        names = {job["name"] for job in started if job["kind"] == "run" and job["state"] in ("at work", "stopping")}
        content = {
            "folder": self.folder.name or str(self.folder),
            "version": __version__,
            "runs": [{**self._row(one), "ours": self._name(one) in names} for one in found.runs],
            "comparisons": [self._comparison_row(one) for one in found.comparisons],
            "studies": [self._name(one) for one in found.studies],
            "jobs": started,
            "cut": found.cut,
        }
        return plain(content)

    def run(self, name: Name) -> Any:
        """Everything about one run; `starting` where it was started a moment ago and has written nothing yet."""
        jobs = [job for job in self.jobs.facts() if job["name"] == name]
        try:
            run = self._run(name)
        except places.Outside:
            if not any(job["kind"] == "run" for job in jobs):
                raise
            return {"name": name, "starting": True, "jobs": jobs}
        return plain({"name": name, **RunFiles(run).detail(), "jobs": jobs, "files": self._files(run)})

    def comparison(self, name: Name) -> Any:
        """A comparison: its methods with mean and spread, and its runs."""
        place = places.find(self.folder, name)
        if not place.is_dir():
            raise places.Outside
        found = read_json(place / "comparison.json")
        runs = [one for one in sorted(place.iterdir()) if not one.is_symlink() and is_run_folder(one)]
        if not isinstance(found, dict) and not runs:
            raise places.Outside
        methods = found.get("methods") if isinstance(found, dict) else None
        jobs = [job for job in self.jobs.facts() if job["name"] == name]
        content = {"name": name, "methods": methods, "runs": [self._row(one) for one in runs], "jobs": jobs}
        return plain({**content, "files": self._files(place)})

    def compare(self, name: Annotated[list[Name], Query()]) -> Any:
        """Chosen runs side by side: their curves and their final figures."""
        if not 1 <= len(set(name)) <= MOST_COMPARED:
            raise BadInput(f"choose 1 to {MOST_COMPARED} runs to compare")
        return plain({"runs": [{"name": one, **RunFiles(self._run(one)).detail()} for one in dict.fromkeys(name)]})

    def start(self, wanted: Start) -> Any:
        """Run a study of this folder."""
        study = places.find(self.folder, wanted.study)
        if not study.is_file() or study.suffix != ".toml" or not is_study(study):
            raise BadInput(f"{wanted.study}: is no study; choose a TOML file of this folder that has a [method] table")
        return {"name": self.jobs.start_run(study, wanted.name or None)}

    def stop(self, wanted: Named) -> Any:
        """Stop a run that was started here."""
        self.jobs.stop(wanted.name)
        return {"name": wanted.name}

    def resume(self, wanted: Named) -> Any:
        """Go on with a run that was stopped."""
        run = self._run(wanted.name)
        if (state := RunFiles(run).state) != "stopped":
            raise BadInput(f"{wanted.name}: is {state}; only a run that was stopped can go on")
        self.jobs.resume_run(run)
        return {"name": wanted.name}

    def report(self, wanted: Named) -> Any:
        """Make the report of a run or comparison."""
        entry = places.find(self.folder, wanted.name)
        if not (entry / "result.json").is_file() and not (entry / "comparison.json").is_file():
            raise BadInput(f"{wanted.name}: has no result yet; a report needs a finished run or comparison")
        self.jobs.make_report(entry)
        return {"name": wanted.name}

    def file(self, name: str, key: str = "", save: bool = False) -> Response:
        """One file, for whoever has the key to it."""
        if not self.access.is_key_for(name, key):
            return JSONResponse({"error": "this link is not valid any more; open it from the page again"}, 403)
        file = places.find(self.folder, name)
        kind, shown = places.type_of(file)
        policy = {"content-security-policy": SANDBOX if kind.startswith("text/html") else "sandbox; default-src 'none'"}
        if kind == "application/pdf":  # a browser's own viewer does not open in a sandbox
            policy = {"content-security-policy": "default-src 'none'; frame-ancestors 'none'"}
        how = "attachment" if save or not shown else "inline"
        return FileResponse(file, media_type=kind, filename=file.name, content_disposition_type=how, headers=policy)

    # --- behind them ------------------------------------------------------------------------------

    def _run(self, name: str) -> Path:
        run = places.find(self.folder, name)
        if not run.is_dir() or not is_run_folder(run):
            raise places.Outside
        return run

    def _name(self, place: Path) -> str:
        return places.name_of(self.folder, place)

    def _row(self, run: Path) -> JsonObject:
        return {"name": self._name(run), **RunFiles(run).summary()}

    def _comparison_row(self, place: Path) -> JsonObject:
        found = read_json(place / "comparison.json")
        methods = table(found, "methods") if isinstance(found, dict) else {}
        return {"name": self._name(place), "methods": list(methods), "finished": isinstance(found, dict)}

    def _files(self, entry: Path) -> list[JsonObject]:
        """Files that can be fetched, each with a link that opens this file and no other."""
        return [
            {
                "file": places.name_of(entry, file),
                "bytes": file.stat().st_size,
                "url": f"/files/{urllib.parse.quote(self._name(file))}?key={self.access.key_for(self._name(file))}",
                "picture": file.suffix.lower() == ".png",
            }
            for file in files_of(entry)
        ]
