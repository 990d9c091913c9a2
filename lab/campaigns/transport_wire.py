"""Hosts on this machine, each a network namespace, and the wire between them, which delays, loses, doubles, reorders.

Every host has a TUN device; a thread of this process carries the packets from one to the other by the rules that hold
then. So TCP, TLS and NVFlare meet real packets, and nothing ever leaves this machine. `isolated` puts all of it into
namespaces of its own (processes, mounts, network): whatever happens to the campaign, the kernel ends what it began.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INSIDE = "POLYCLINIC_WIRE_INSIDE"
SERVER = "10.77.0.1"
#: the name of the server, which only the processes of the campaign can look up
SERVER_NAME = "coordinator.test"
_NEW_NETWORK, _TUNSETIFF, _TUN_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1001
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def isolated() -> Iterator[Path]:
    """Go on in namespaces of our own, in a folder that is gone afterwards; outside of them nothing goes on."""
    if INSIDE not in os.environ:
        if os.geteuid() or not Path("/dev/net/tun").exists():
            print("network namespaces and /dev/net/tun are needed, and root's rights for them", file=sys.stderr)
            sys.exit(2)
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(_in_namespaces({**os.environ, INSIDE: folder}))
    if child := os.fork():  # the first process of a namespace reaps all others, and they end with it
        while (ended := os.wait())[0] != child:
            pass
        os._exit(os.waitstatus_to_exitcode(ended[1]) & 255)
    place = Path(os.environ[INSIDE])
    (place / "hosts").write_text(f"127.0.0.1 localhost\n{SERVER} {SERVER_NAME}\n")
    subprocess.run(["mount", "--bind", place / "hosts", "/etc/hosts"], check=True)
    yield place


def _in_namespaces(environment: dict[str, str]) -> int:
    options = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    process = subprocess.Popen(["unshare", *options, sys.executable, *sys.argv], env=environment)
    signal.signal(signal.SIGTERM, lambda *_: process.kill())
    try:
        return process.wait()
    finally:
        process.kill()


@dataclass(frozen=True)
class Rule:
    """What happens to the packets from one host to another: shares of them, and seconds."""

    lost: float = 0.0
    doubled: float = 0.0
    reordered: float = 0.0
    delay: float = 0.0


class Host:
    """A network namespace with one address; `run` and `start` begin processes in it."""

    def __init__(self, name: str, address: str, *, here: bool = False) -> None:
        """`here`: the namespace is that of this process."""
        self.name, self.address, self._pid = name, address, os.getpid()
        if not here:
            self._pid = subprocess.Popen(["unshare", "--net", "sleep", "infinity"]).pid
            while os.readlink(f"/proc/{self._pid}/ns/net") == os.readlink("/proc/self/ns/net"):
                time.sleep(0.01)
        self.tun = self._open_tun()
        for words in (f"address add {address}/24 dev wire0", "link set wire0 up", "link set lo up"):
            subprocess.run([*self.enter, "ip", *words.split()], check=True)

    @property
    def enter(self) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._pid}/ns/net"]

    def _open_tun(self) -> int:
        """A TUN device in the host's namespace; it is gone when this process is."""
        with open("/proc/thread-self/ns/net") as ours, open(f"/proc/{self._pid}/ns/net") as theirs:
            _enter(theirs.fileno())
            try:
                device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", b"wire0", _TUN_WITHOUT_HEADER))
            finally:
                _enter(ours.fileno())
        return device


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


class Wire:
    """Carries packets between hosts; what is drawn (which packet is lost) comes from the seed."""

    def __init__(self, hosts: list[Host], seed: int) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.rules: dict[tuple[str, str], Rule] = {}
        #: hosts whose packets to the server's address go to another one with that address
        self.astray: dict[str, str] = {}
        self.carried = self.lost = 0
        self._draw = random.Random(f"{seed} wire")
        threading.Thread(target=self._carry, daemon=True).start()

    def between(self, one: str, other: str, rule: Rule | None, *, both: bool = True) -> None:
        """Set the rule from one host to the other, and back; None takes it away."""
        for pair in [(one, other), (other, one)][: 1 + both]:
            self.rules.pop(pair, None)
            if rule:
                self.rules[pair] = rule

    def heal(self) -> None:
        self.rules, self.astray = {}, {}

    def _target(self, source: str, packet: bytes) -> Host | None:
        address = socket.inet_ntoa(packet[16:20])
        if address == SERVER:
            return self.hosts[self.astray.get(source, "server")]
        return next((host for host in self.hosts.values() if host.address == address), None)

    def _carry(self) -> None:
        by_tun = {host.tun: host.name for host in self.hosts.values()}
        due: list[tuple[float, int, int, bytes]] = []
        while True:
            wait = max(0.0, due[0][0] - time.monotonic()) if due else 1.0
            for tun in select.select(list(by_tun), [], [], wait)[0]:
                packet = os.read(tun, 65536)
                target = self._target(by_tun[tun], packet) if packet[0] >> 4 == 4 else None
                if target is None:
                    continue
                rule = self.rules.get((by_tun[tun], target.name), Rule())
                self.carried += 1
                if self._draw.random() < rule.lost:
                    self.lost += 1
                    continue
                late = rule.delay + 0.2 * (self._draw.random() < rule.reordered)
                for _ in range(1 + (self._draw.random() < rule.doubled)):
                    heapq.heappush(due, (time.monotonic() + late, self.carried, target.tun, packet))
            while due and due[0][0] <= time.monotonic():
                _, _, tun, packet = heapq.heappop(due)
                try:
                    os.write(tun, packet)
                except OSError:  # its queue is full: a packet that is lost
                    self.lost += 1
