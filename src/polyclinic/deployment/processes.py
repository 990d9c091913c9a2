"""Participants as processes: one in the foreground, or all of a deployment on this machine for a rehearsal."""

import contextlib
import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.deployment.approval_rules import rules_of
from polyclinic.deployment.confirmation import confirmation_of
from polyclinic.engines.nvflare.job import end_tree
from polyclinic.engines.worker_process import python_command
from polyclinic.errors import BadInput, Damaged, WorkFailed
from polyclinic.files import atomic_write, read_json
from polyclinic.json_types import JsonObject

#: the processes of a rehearsal, by participant: their numbers and when they were started
RUNNING = "running.json"


@dataclass(frozen=True)
class Participant:
    """A server or site by its kit."""

    name: str
    kit: Path

    @classmethod
    def of(cls, kit: Path) -> "Participant":
        """The participant whose kit this is; BadInput if it is none."""
        startup = kit / "startup"
        if (startup / "fed_server.json").is_file():
            return cls("server", kit.resolve())
        if (startup / "fed_client.json").is_file():
            client = read_json(startup / "fed_client.json").get("client")
            if not isinstance(client, dict) or not isinstance(client.get("fqsn"), str):
                raise Damaged(f"{startup}/fed_client.json: is damaged; do `polyclinic site confirm ADMISSION` again")
            return cls(client["fqsn"], kit.resolve())
        if list(kit.glob("*.request.json")):
            raise BadInput(f"{kit}: nothing is confirmed yet; `polyclinic site confirm ADMISSION` makes the kit")
        raise BadInput(f"{kit}: is no kit of a server or site; `deploy init` and `site join` make them")

    @property
    def command(self) -> list[str]:
        from cryptography import x509

        kind, more = ("server", []) if self.name == "server" else ("client", [f"uid={self.name}"])
        certificate = x509.load_pem_x509_certificate((self.kit / "startup" / f"{kind}.crt").read_bytes())
        org = certificate.subject.get_attributes_for_oid(x509.NameOID.ORGANIZATION_NAME)[0].value
        settings = ["secure_train=true", *more, f"org={org!s}", "config_folder=config"]
        module = f"nvflare.private.fed.app.{kind}.{kind}_train"
        return python_command(module, "-m", str(self.kit), "-s", f"fed_{kind}.json", "--set", *settings)

    def start(self, output: Any = None, *, alone: bool = True) -> subprocess.Popen:
        """Start the participant's process; what it prints goes to `output`, by default where ours goes.

        With `alone` a process whose output goes elsewhere is out of reach of this terminal's Ctrl-C.
        """
        refuse_if_left(self.kit)
        if process_of(self.kit):
            raise BadInput(f"{self.kit}: {self.name} runs on this machine already; end that process first")
        confirmation_of(self.kit)
        for leftover in ("shutdown.fl", "restart.fl"):  # or it would end at once
            (self.kit / leftover).unlink(missing_ok=True)
        (self.kit / "transfer").mkdir(exist_ok=True)
        if self.name == "server":
            keep_in_kit(self.kit)
        environment = {"MALLOC_ARENA_MAX": "4", **os.environ}
        return subprocess.Popen(
            self.command,
            cwd=self.kit,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=alone and output is not None,
        )


def keep_in_kit(kit: Path) -> None:
    """Have a server keep its jobs in its own folder, wherever that is now, and not in /tmp."""
    path = kit / "local" / "resources.json"
    resources = json.loads(path.read_text(encoding="utf-8"))
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit / "store" / "snapshots")
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(kit / "store" / "jobs")
    atomic_write(path, json.dumps(resources, indent=2))


class Rehearsal:
    """All participants of a deployment, here, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "sites").is_dir():
            cure = "`polyclinic deploy init` makes one of a study with images of its own"
            raise BadInput(f"{folder}: is no deployment with all sites on one machine, a rehearsal; {cure}")

    def participants(self) -> list[Participant]:
        return [Participant.of(self.folder / "server"), *map(Participant.of, sorted((self.folder / "sites").iterdir()))]

    def up(self, names: list[str]) -> list[str]:
        """Start those that do not run (all, or the named ones), and return their names."""
        running = self.running()
        known = {one.name: one for one in self.participants()}
        for name in names:
            if name not in known:
                raise BadInput(f"{name}: no such participant; there are {', '.join(known)}")
        started = [known[name] for name in names or known if name not in running]
        noted = self._noted()
        for one in started:
            with (one.kit / "console.log").open("ab") as output:
                process = one.start(output)
            noted[one.name] = {"pid": process.pid, "started": _started(process.pid)}
            self._note(noted)
        return [one.name for one in started]

    def approving_every_study(self) -> list[str]:
        """The sites whose rules approve every study without a person, as the kits of a rehearsal have it."""
        sites = self.participants()[1:]
        return [one.name for one in sites if rules_of(one.kit / "local" / "policy.toml").every]

    def running(self) -> dict[str, int]:
        """The participants that run, by their process's number."""
        return {name: one["pid"] for name, one in self._noted().items() if _started(one["pid"]) == one["started"]}

    def down(self, names: list[str], patience: float = 20.0) -> list[str]:
        """End those that run (all, or the named ones), also by `deploy start`, and everything they started; sites
        first."""
        begun = {one.name: pid for one in self.participants() if (pid := process_of(one.kit))}
        running = begun | self.running()
        chosen = [name for name in reversed(list(running)) if not names or name in names]
        end_tree(*(running[name] for name in chosen), patience=patience)
        self._note({name: one for name, one in self._noted().items() if name not in chosen})
        return chosen

    def wait_until_up(self, seconds: float) -> None:
        """Wait for the log lines that say the server serves; WorkFailed if a process ends instead."""
        log, until = self.folder / "server" / "log.txt", time.monotonic() + seconds
        while time.monotonic() < until:
            if "server" not in self.running():
                raise WorkFailed(f"the server ended; see {self.folder / 'server' / 'console.log'}")
            if log.exists() and "Server started" in log.read_text(encoding="utf-8", errors="replace"):
                return
            time.sleep(0.3)
        raise WorkFailed(f"the server did not start within {seconds:g} seconds (--within); see {log}")

    def _noted(self) -> dict[str, JsonObject]:
        path = self.folder / RUNNING
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _note(self, processes: dict[str, JsonObject]) -> None:
        atomic_write(self.folder / RUNNING, json.dumps(processes, indent=1))


def _started(pid: int) -> float | None:
    """When a process was started: with its number, that tells it from another which got the same number later."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time(), 2)
    except psutil.NoSuchProcess:
        return None


def process_of(kit: Path) -> int | None:
    """The number of the process of this kit's server or site, where it runs on this machine."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if str(kit.resolve()) in command and any(
                word.endswith(("client_train", "server_train")) for word in command
            ):
                return process.pid
    return None


#: in a kit: says that its site has left, and when
LEFT = "left.txt"


def refuse_if_left(kit: Path) -> None:
    """BadInput for the kit of a site that has left."""
    if (kit / LEFT).exists():
        told = (kit / LEFT).read_text(encoding="utf-8").strip()
        raise BadInput(f"{kit}: {told}; to take part again, join anew (`polyclinic site join`)")
