"""The server's life: a port, an address with its token, and an end that leaves nothing behind."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

import uvicorn

from polyclinic.errors import BadInput
from polyclinic.report.serve.guard import LOOPBACK, Access, App

#: connections at once: a browser has six
MOST_CONNECTIONS = 64


@dataclass(frozen=True)
class Listening:
    """A socket that is bound, and who may ask."""

    socket: socket.socket
    access: Access
    host: str

    @property
    def address(self) -> str:
        """What to open in a browser. The token stands behind '#': no browser sends that part to anybody."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.access.port}/#token={self.access.token}"


def listen(host: str, port: int, names: tuple[str, ...] = ()) -> Listening:
    """Bind the address; `names` are further names under which browsers may call the server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        bound.close()
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        reason = "is taken already" if taken else f"cannot be used ({getattr(error, 'strerror', None) or error})"
        raise BadInput(f"--host {host} --port {port}: this address {reason}; choose another --port") from None
    called = (*LOOPBACK, *names, *(() if is_wildcard(host) else (f"[{host}]" if ":" in host else host,)))
    lower = tuple(dict.fromkeys(name.lower() for name in called))
    return Listening(bound, Access(bound.getsockname()[1], lower), host)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether an address means every address of this machine."""
    return host in ("0.0.0.0", "::", "")


def serve(app: App, listening: Listening) -> None:
    """Answer until Ctrl-C, or until the process is asked to end."""
    make(app).run(sockets=[listening.socket])


def make(app: App) -> uvicorn.Server:
    """A server that says nothing about itself, trusts no header of a proxy, and speaks plain HTTP only."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=3,
    )
    return uvicorn.Server(config)
