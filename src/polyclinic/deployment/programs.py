"""What NVFlare runs: the coordinator's program at the server, and the site's program at every site.

NVFlare makes one object of each class for a job and finds their functions by their marks. Nothing but bytes and a word
travels between them.
"""

from __future__ import annotations

import sys
from typing import Any

from nvflare.collab import CollabCallError, collab

from polyclinic.engines.nvflare.engine import Send
from polyclinic.engines.nvflare.job import plain
from polyclinic.engines.nvflare.relay import Relay
from polyclinic.engines.worker_process import WorkerProcess


class Coordinator:
    """At the server: runs the study, its sites reached through NVFlare."""

    @collab.main
    def run(self) -> None:
        from polyclinic.deployment.simulation import coordinate

        coordinate(plain(collab.get_app_prop("order")), {proxy.name: sender(proxy) for proxy in collab.clients})


class SiteProgram:
    """At a site: takes the coordinator's calls and nobody else's."""

    def __init__(self) -> None:
        self._relay: Relay | None = None

    @collab.init
    def start(self) -> None:
        from polyclinic.deployment.simulation import site_of

        site, worker = site_of(plain(collab.get_app_prop("order")), collab.site_name)
        command = [sys.executable, "-m", "polyclinic.worker", worker.order]
        self._relay = Relay(site, lambda: WorkerProcess(command, threads=worker.threads))

    @collab.publish
    def call(self, what: str, payload: bytes) -> bytes:
        """See `engines.nvflare.wire`."""
        if collab.caller != "server":
            raise PermissionError(f"'{collab.caller}' is not the coordinator")
        assert self._relay is not None
        return self._relay.handle(what, payload)

    @collab.final
    def stop(self) -> None:
        if self._relay:
            self._relay.close()


def sender(proxy: Any) -> Send:
    """How the engine sends to a site: TimeoutError where the site was not reached or did not answer."""

    def send(what: str, payload: bytes, timeout: float) -> bytes:
        try:
            return proxy(timeout=timeout).call(what, payload)
        except CollabCallError as error:
            if error.remote_traceback is not None:  # it was reached, and raised
                raise RuntimeError(str(error.cause)) from None
            raise TimeoutError(str(error.cause)) from None

    return send
