"""A federation of NVFlare processes on hosts of its own, and what is done to it: one fault a class of trouble."""

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
from transport_wire import SERVER, SERVER_NAME, Host, Rule, Wire

from polyclinic.deployment.admin import Administration
from polyclinic.errors import WorkFailed

SITES = ("site-1", "site-2", "site-3")
#: the site whose kit lies on a small disk
ON_SMALL_DISK = "site-3"
#: the processes of a participant, by what their command lines have
SERVER_ITSELF, SITE_ITSELF = "server_train", "client_train"
JOB_AT_SERVER, JOB_AT_SITE, CHILD = "server.runner_process", "client.worker_process", "deployment.deployed_site"


class Federation:
    """Server and sites of a deployment, each on a host of its own; the admin's commands run on the server's."""

    def __init__(self, place: Path, study: Path, seed: int) -> None:
        self.place, self.folder = place, place / "deployment"
        self.hosts = {"server": Host("server", SERVER, here=True), "twin": Host("twin", SERVER)}
        self.hosts |= {site: Host(site, f"10.77.0.{number + 2}") for number, site in enumerate(SITES)}
        self.wire = Wire(list(self.hosts.values()), seed)
        self.running: dict[str, subprocess.Popen] = {}
        command = [*POLYCLINIC, "deploy", "init", study, "-d", self.folder, "--server", SERVER_NAME]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        small, whole = self.kit(ON_SMALL_DISK), place / "whole"
        small.rename(whole)
        small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=700", "tmpfs", small], check=True)
        shutil.copytree(whole, small, dirs_exist_ok=True)
        shifted = Path(__file__).with_name("shifted_clock.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", place / "clock.so", shifted], check=True)
        self.recover()

    def kit(self, name: str) -> Path:
        return self.folder / ("server" if name == "server" else f"sites/{name}")

    def set_clock(self, name: str, hours: float) -> None:
        with os.fdopen(os.open(self.place / f"{name}.clock", os.O_RDWR | os.O_CREAT), "r+b") as file:  # it is mapped
            file.write(struct.pack("q", round(3600 * hours)))

    def start(self, name: str, kit: Path | None = None) -> subprocess.Popen:
        """A participant's own command, on its host; `kit`: another copy of its kit, on the host `twin`."""
        host = self.hosts[name if kit is None else "twin"]
        clock = {"LD_PRELOAD": str(self.place / "clock.so"), "SHIFTED_BY": str(self.place / f"{name}.clock")}
        with (self.place / f"{name}.out").open("ab") as output:
            return subprocess.Popen(
                [*host.enter, *POLYCLINIC, "deploy", "start", kit or self.kit(name)],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | clock,
            )

    def recover(self) -> None:
        """Every fault is over: start who does not run, and wait until all are connected; WorkFailed if they are not."""
        self.wire.heal()
        for name in ("server", *SITES):
            self.set_clock(name, 0)
            if name not in self.running or not list(self.processes(name, SERVER_ITSELF, SITE_ITSELF)):
                self.end(name)
                self.running[name] = self.start(name)
        until = time.monotonic() + 300
        while time.monotonic() < until:
            with contextlib.suppress(WorkFailed), Administration(self.folder, within=20) as administration:
                if administration.connected() == sorted(SITES):
                    return
            time.sleep(1)
        raise WorkFailed("server and sites are not all connected 300 seconds after every fault was over")

    def begin_again(self) -> None:
        """End all, and start all."""
        for name in ("server", *SITES):
            self.end(name)
        self.recover()

    def processes(self, name: str, *of: str) -> Iterator[psutil.Process]:
        """The processes of a participant that run, those that a command line tells by one of the words `of`."""
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self.running[name].pid)
            for one in [first, *first.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    words = " ".join(one.cmdline())
                    if one.status() != psutil.STATUS_ZOMBIE and (not of or any(word in words for word in of)):
                        yield one

    def send(self, name: str, number: int, *of: str) -> int:
        """Send a signal to processes of a participant; how many there were."""
        found = list(self.processes(name, *of))
        for one in found:
            with contextlib.suppress(psutil.Error):
                one.send_signal(number)
        return len(found)

    def end(self, name: str) -> None:
        """Kill all of a participant."""
        if name in self.running:
            self.send(name, signal.SIGKILL)
            self.running.pop(name).wait()


POLYCLINIC = [sys.executable, "-m", "polyclinic"]


@dataclass(frozen=True)
class Fault:
    """One trouble: what, to whom, when (a round of the run, and seconds after it has begun), for how many seconds."""

    kind: str
    whom: str
    round: int
    after: float
    lasts: float

    def begin(self, federation: Federation) -> Callable[[], object]:
        """Do it; what ends it."""
        return KINDS[self.kind][1](federation, self)


def _between(rule: Rule, *, both: bool = True, towards: bool = True) -> Callable:
    """A rule of the wire between a site and the server."""

    def begin(federation: Federation, fault: Fault) -> Callable[[], object]:
        pair = (fault.whom, "server") if towards else ("server", fault.whom)
        federation.wire.between(*pair, rule, both=both)
        return lambda: federation.wire.between(*pair, None, both=both)

    return begin


def _everyone_cut(federation: Federation, fault: Fault) -> Callable[[], object]:
    for site in SITES:
        federation.wire.between(site, "server", Rule(lost=1.0))
    return lambda: [federation.wire.between(site, "server", None) for site in SITES]


def _killed(*of: str) -> Callable:
    def begin(federation: Federation, fault: Fault) -> Callable[[], object]:
        federation.send(fault.whom, signal.SIGKILL, *of)
        return lambda: _again(federation, fault.whom)

    return begin


def _again(federation: Federation, name: str) -> None:
    if not list(federation.processes(name, SERVER_ITSELF, SITE_ITSELF)):
        federation.end(name)
        federation.running[name] = federation.start(name)


def _stopped(federation: Federation, fault: Fault) -> Callable[[], object]:
    federation.running[fault.whom].send_signal(signal.SIGTERM)  # as a service manager does
    return lambda: _again(federation, fault.whom)


def _frozen(federation: Federation, fault: Fault) -> Callable[[], object]:
    federation.send(fault.whom, signal.SIGSTOP)
    return lambda: federation.send(fault.whom, signal.SIGCONT)


def _clock(hours: float) -> Callable:
    def begin(federation: Federation, fault: Fault) -> Callable[[], object]:
        federation.set_clock(fault.whom, hours)
        return lambda: federation.set_clock(fault.whom, 0)

    return begin


def _full(federation: Federation, fault: Fault) -> Callable[[], object]:
    filler = federation.kit(ON_SMALL_DISK) / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    return lambda: filler.unlink(missing_ok=True)


def _second_server(federation: Federation, fault: Fault) -> Callable[[], object]:
    """The same kit is started a second time on the same machine."""
    second = federation.start("server")
    return lambda: _ended(second)


def _twin(federation: Federation, fault: Fault) -> Callable[[], object]:
    """A copy of the server's kit runs on another machine, and one site's packets come to that one."""
    copy = federation.place / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(federation.kit("server"), copy)
    second = federation.start("server", copy)
    federation.wire.astray[fault.whom] = "twin"

    def end() -> None:
        federation.wire.astray.pop(fault.whom, None)
        _ended(second)

    return end


def _ended(process: subprocess.Popen) -> None:
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(process.pid).children(recursive=True):
            one.kill()
    process.kill()
    process.wait()


_ANY, _SERVER, _SMALL = SITES, ("server",), (ON_SMALL_DISK,)
#: name: whom it may hit, how it is done, for how many seconds (from, to)
KINDS: dict[str, tuple[tuple[str, ...], Callable, tuple[float, float]]] = {
    "partition": (_ANY, _between(Rule(lost=1.0)), (2.0, 40.0)),
    "partition of all": (_SERVER, _everyone_cut, (2.0, 30.0)),
    "nothing reaches the server": (_ANY, _between(Rule(lost=1.0), both=False), (2.0, 40.0)),
    "nothing reaches the site": (_ANY, _between(Rule(lost=1.0), both=False, towards=False), (2.0, 40.0)),
    "loss of a fifth": (_ANY, _between(Rule(lost=0.2)), (5.0, 30.0)),
    "30 s late": (_ANY, _between(Rule(delay=30.0), both=False), (5.0, 40.0)),
    "doubled and reordered": (_ANY, _between(Rule(doubled=0.3, reordered=0.3)), (20.0, 60.0)),
    "server killed": (_SERVER, _killed(SERVER_ITSELF), (1.0, 10.0)),
    "coordinator's job killed": (_SERVER, _killed(JOB_AT_SERVER), (1.0, 1.0)),
    "site killed": (_ANY, _killed(SITE_ITSELF), (1.0, 20.0)),
    "site's job killed": (_ANY, _killed(JOB_AT_SITE), (1.0, 1.0)),
    "child killed": (_ANY, _killed(CHILD), (1.0, 1.0)),
    "site stopped": (_ANY, _stopped, (1.0, 20.0)),
    "frozen": ((*SITES, "server"), _frozen, (2.0, 40.0)),
    "clock 5 h ahead": ((*SITES, "server"), _clock(5.0), (5.0, 30.0)),
    "clock 30 h behind": ((*SITES, "server"), _clock(-30.0), (5.0, 30.0)),
    "disk full": (_SMALL, _full, (5.0, 30.0)),
    "a second server": (_SERVER, _second_server, (5.0, 30.0)),
    "a server's twin": (_ANY, _twin, (5.0, 30.0)),
}


def draw_faults(draw: Random, first: str, kinds: list[str], rounds: int) -> list[Fault]:
    """The faults of a trial: one to three, the first of a given kind."""
    chosen = [first, *draw.choices(kinds, k=draw.choice((0, 0, 1, 1, 2)))]
    found = []
    for kind in chosen:
        after, lasts = draw.uniform(0.0, 3.0), draw.uniform(*KINDS[kind][2])
        found.append(Fault(kind, draw.choice(KINDS[kind][0]), draw.randrange(rounds), round(after, 2), round(lasts, 1)))
    return found
