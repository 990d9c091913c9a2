"""Trials of the transport campaign: a study is submitted, faults begin and end, and the run is judged."""

import contextlib
import io
import json
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from transport_faults import KINDS, POLYCLINIC, SITES, Fault, Federation, draw_faults

from polyclinic.cli import run_app
from polyclinic.errors import WorkFailed
from polyclinic.runner.run.run import run
from polyclinic.study import Study

ROUNDS = 3
TABLES: dict[str, dict[str, Any]] = {
    "data": {"source": "fundus-phantom", "samples": 48, "size": 28},
    "sites": {"partition": "iid", "count": len(SITES)},
    "model": {"backbone": "lenet5"},
    "optimizer": {"batch_size": 8, "lr": 0.05},
    "evaluation": {"select": "last"},
    # all sites or none: a round without one of them has other weights
    "engine": {"workers": 1, "device": "cpu", "silence": 12.0, "quorum": 1.0, "on_failure": "stop"},
    "method": {"name": "fedavg", "rounds": ROUNDS},
}
STUDIES: dict[str, dict[str, dict[str, Any]]] = {
    "fedavg": {"method": {"name": "fedavg", "rounds": ROUNDS, "local_steps": 40}},
    "cwt": {"method": {"name": "cwt", "rounds": ROUNDS, "local_steps": 20}},
    "cwt-replay": {
        "method": {"name": "cwt-replay", "rounds": ROUNDS, "local_steps": 20},
        "generator": {"epochs": 2, "width": 8, "blocks": 1, "top_codes": 16, "bottom_codes": 16}
        | {"prior_epochs": 1, "prior_width": 8, "prior_layers": 1},
    },
    "fedreplay": {"method": {"name": "fedreplay", "rounds": ROUNDS}},
    "secure sum": {
        "method": {"name": "fedavg", "rounds": ROUNDS, "local_steps": 40},
        "federation": {"sum": "secure"},
    },
}
#: seconds that a submission may take, faults and all
ENDS_WITHIN = 1200.0
#: submissions of one run: the first, and those that resume it
SUBMISSIONS = 4


@dataclass
class Trial:
    """What was done, how it ended, and what is wrong with that (nothing: "")."""

    number: int
    study: str
    faults: list[dict[str, Any]]
    outcome: str = ""
    problem: str = ""
    detail: str = ""
    stops: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Campaign:
    """A federation that runs, and the digests that its runs must end with."""

    def __init__(self, place: Path, seed: int, studies: str, kinds: str, kept: Path | None) -> None:
        """`studies`, `kinds`: names with commas between them, none for all. `kept`: where logs and run folders of a
        trial that failed are put."""
        self.place, self.seed, self.kept = place, seed, kept
        self.names = studies.split(",") if studies else list(STUDIES)
        self.kinds = kinds.split(",") if kinds else list(KINDS)
        self.expected: dict[str, str] = {}
        for name in self.names:
            study = Study(**{**TABLES, **STUDIES[name]})
            self.file(name).write_text(study.to_toml())
            self.expected[name] = run(study, place / "simulated" / name).values["weights_sha256"]
        self.federation = Federation(place, self.file(self.names[0]), seed)

    def file(self, study: str) -> Path:
        return self.place / f"{study.replace(' ', '-')}.toml"

    def trial(self, number: int) -> Trial:
        """The trial of a number: the same faults for the same seed, whatever was tried before."""
        draw = Random(f"{self.seed} {number}")
        faults = draw_faults(draw, self.kinds[number % len(self.kinds)], self.kinds, ROUNDS)
        trial = Trial(number, self.names[number % len(self.names)], [asdict(fault) for fault in faults])
        begun = time.monotonic()
        try:
            self._carry_out(trial, faults)
        except WorkFailed as error:
            trial.problem, trial.detail = "not recovered", str(error)
        trial.seconds = round(time.monotonic() - begun, 1)
        if trial.problem:
            self._keep(trial)
            self.federation.begin_again()
        return trial

    def _keep(self, trial: Trial) -> None:
        """Put aside what may say why: the folders of the run, and all logs."""
        if self.kept is None:
            return
        target, name = self.kept / f"{self.seed}-{trial.number}", f"trial-{trial.number}"
        for folder in (self.federation.folder / "server", *(self.federation.folder / "sites").iterdir()):
            files = [
                *folder.glob("*.log"),
                *folder.glob("*.txt"),
                *folder.glob("suspended/*"),
                *folder.glob("*/log.txt"),
            ]
            for file in [*files, *(one for one in (folder / "runs" / name).rglob("*") if one.is_file())]:
                there = target / file.relative_to(self.federation.folder)
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, there)

    def _carry_out(self, trial: Trial, faults: list[Fault]) -> None:
        name = f"trial-{trial.number}"
        for attempt in range(SUBMISSIONS):
            code, said = self._submit(trial.study, name, faults if attempt == 0 else [], resume=attempt > 0)
            self.federation.recover()
            if "Traceback" in said:
                trial.problem, trial.detail = "a traceback", said[-3000:]
                return
            if code is None:
                trial.problem, trial.detail = "hangs", said[-3000:]
                return
            if code == 0:
                break
            trial.stops.append(f"{code}: {said.strip().splitlines()[-1] if said.strip() else ''}")
            if code not in (1, 2) or len(trial.stops[-1]) < 10:
                trial.problem, trial.detail = "no sentence", said[-3000:]
                return
            self._look(trial, name)
        else:
            trial.problem, trial.detail = "is not resumed", said[-3000:]
            return
        trial.outcome = "stopped, resumed, same weights" if trial.stops else "same weights"
        self._judge(trial, name)

    def _submit(self, study: str, name: str, faults: list[Fault], *, resume: bool) -> tuple[int | None, str]:
        """Submit a run, do the faults when their time has come; exit code (None: it did not end) and what was said."""
        command = [*POLYCLINIC, "deploy", "submit", self.file(study), "-d", self.federation.folder, "--name", name]
        output = self.place / "submit.out"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*map(str, command), *(["--resume"] if resume else [])], stdout=file, stderr=subprocess.STDOUT
            )
        history = self.federation.kit("server") / "runs" / name
        until, waiting, ends = time.monotonic() + ENDS_WITHIN, list(faults), []
        seen: dict[int, float] = {}
        while process.poll() is None and time.monotonic() < until:
            now = time.monotonic()
            if (history / "study.toml").exists():
                lines = (
                    (history / "history.jsonl").read_text().count("\n") if (history / "history.jsonl").exists() else 0
                )
                for number in range(lines + 1):
                    seen.setdefault(number, now)
            for fault in [one for one in waiting if one.round in seen and now >= seen[one.round] + one.after]:
                waiting.remove(fault)
                ends.append((now + fault.lasts, fault.begin(self.federation)))
            for over in [one for one in ends if now >= one[0]]:
                ends.remove(over)
                over[1]()
            time.sleep(0.05)
        for _, end in ends:
            end()
        code = process.poll()
        process.kill()
        process.wait()
        return code, output.read_text(errors="replace")

    def _look(self, trial: Trial, name: str) -> None:
        """A person at each site looks at what is suspended, and lets it go on."""
        for site in SITES:
            kit = self.federation.kit(site)
            if list((kit / "suspended").glob("*.json")):
                trial.stops.append(f"{site} is suspended")
                quiet(["site", "approve", name, "--kit", str(kit)])

    def _judge(self, trial: Trial, name: str) -> None:
        """Weights, ledgers of both sides, and what left how often."""
        at_server = self.federation.kit("server") / "runs" / name
        found = json.loads((at_server / "result.json").read_text())["weights_sha256"]
        if found != self.expected[trial.study]:
            trial.problem, trial.detail = "other weights", found
        for site in SITES:
            folder = self.federation.kit(site) / "runs" / name
            code, said = quiet(["ledger", "verify", str(folder), "--against", str(at_server)])
            if code:
                trial.problem, trial.detail = "ledgers differ", f"{site}: {said[-1500:]}"
            ledger = folder / "ledger" / f"{site}.jsonl"
            lines = [json.loads(line) for line in ledger.read_text().splitlines()]
            twice = Counter(
                (line["round"], line["operation"], line["kind"], line["to"], line["digest"]) for line in lines
            )
            if again := [key for key, count in twice.items() if count > 1]:
                trial.problem, trial.detail = "left twice", f"{site}: {again[:3]}"


def quiet(arguments: list[str]) -> tuple[int, str]:
    """Exit code and words of a command, in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = run_app(arguments)
    return code, said.getvalue()
