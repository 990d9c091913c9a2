"""The classes that NVFlare imports by their names: the coordinator's program, the site's, the builder of certificates.

NVFlare makes one object of each program for a job and finds its functions by their marks. Nothing but bytes and a word
travels between them.
"""

import datetime
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.collab import CollabCallError, collab
from nvflare.collab.api.exceptions import RunAborted
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.lighter.impl import cert

from polyclinic.deployment.coordination import Coordination
from polyclinic.engines.nvflare.engine import JOB_ENDED, JobEnded, Send
from polyclinic.engines.nvflare.job import SPEC, STATUS, STOP, TOKEN, decode_property, end_with, is_simulated
from polyclinic.engines.nvflare.relay import Relay, refusal
from polyclinic.engines.worker_process import reason_of
from polyclinic.errors import BadInput

log = logging.getLogger(__name__)
#: seconds that a site which is stopped waits for the coordinator to know
LEAVES_WITHIN = 2.0


class Coordinator:
    """At the server: runs the study, its sites reached through NVFlare."""

    def __init__(self) -> None:
        self._run: Coordination | None = None

    @collab.publish
    def leaves(self) -> None:
        """The site that calls is being stopped."""
        if self._run:
            self._run.leaves(collab.caller)

    @collab.main
    def run(self) -> None:
        job_spec = decode_property(collab.get_app_prop(SPEC))
        sends = {proxy.name: sender(proxy) for proxy in collab.clients}
        if "assembly" in job_spec:
            refuse_unless_simulated(job_spec)
            from polyclinic.runner.run.nvflare_simulation import coordinate_simulation

            coordinate_simulation(job_spec, sends)
        else:
            self._run = run = coordination_of(job_spec, sends)
            log.info("the run ended: %s", run.run().reason or "finished")


def coordination_of(job_spec: dict[str, Any], sends: dict[str, Send]) -> Coordination:
    """The run of a job at a real server. One that stops may be resumed; why it stopped is in the job's folder."""
    from polyclinic.deployment.coordination import Reach, coordinate

    end_with(os.getppid())  # a server that was killed must not go on writing into the run folder
    context = collab.fl_ctx
    engine, workspace = context.get_engine(), collab.workspace
    reach = Reach(sends, lambda site: is_present(engine.get_cell(), site))
    job = Path(workspace.get_run_dir(context.get_job_id()))
    run = coordinate(job_spec, reach, Path(workspace.get_root_dir()), job)
    engine.register_app_command(STATUS, lambda topic, data, fl_ctx: run.status())
    engine.register_app_command(STOP, lambda topic, data, fl_ctx: run.stop())
    return run


class SiteProgram:
    """At a site: takes the coordinator's calls and nobody else's."""

    def __init__(self) -> None:
        self._relay: Relay | None = None
        self._refusal = ""
        self._server: Any = None

    @collab.init
    def start(self) -> None:
        """A site that cannot take part says so when it is called: the others need not stop for it."""
        kit = Path(collab.workspace.get_root_dir())
        self._server = collab.server
        try:
            self._relay = relay_for(decode_property(collab.get_app_prop(SPEC)), collab.site_name, kit, self._leave)
        except Exception as error:
            log.exception("this site cannot take part")
            self._refusal = refusal_at(kit, error)

    @collab.publish
    def call(self, what: str, payload: bytes) -> bytes:
        """See `engines.nvflare.wire`."""
        if collab.caller != "server":
            raise PermissionError(f"'{collab.caller}' is not the coordinator")
        if self._relay is None:
            return refusal(self._refusal)
        try:
            return self._relay.handle(what, payload)
        except Exception as error:  # NVFlare would send its traceback, with this machine's paths
            return refusal(self._relay.tell(error))

    def _leave(self) -> None:
        """The site is being stopped: the coordinator need not wait for it."""
        if self._relay:
            self._relay.leave()
        self._server(timeout=LEAVES_WITHIN).leaves()

    @collab.final
    def stop(self) -> None:
        if self._relay:
            self._relay.leave(JOB_ENDED)


def relay_for(job_spec: dict[str, Any], name: str, kit: Path, leave: Callable[[], None] = lambda: None) -> Relay:
    """The relay of a site: a simulated one where the simulator started this process, else a deployed one."""
    if "assembly" in job_spec:
        refuse_unless_simulated(job_spec)
        from polyclinic.runner.run.nvflare_simulation import relay_of_simulated_site

        return relay_of_simulated_site(job_spec, name)
    from polyclinic.deployment.deployed_site import relay_of

    return relay_of(job_spec, name, kit, leave)


def refuse_unless_simulated(job_spec: dict[str, Any]) -> None:
    """BadInput unless this process is one of the simulation that sends the order: a simulated study's policy, folders
    and plug-ins are the sender's."""
    if not is_simulated(str(job_spec.get("token", ""))):
        raise BadInput("this is no simulation and takes part in deployed studies only; send it with deploy submit")


def refusal_at(kit: Path, error: Exception) -> str:
    """What a site that cannot take part tells the coordinator; a simulated one has nothing to hide."""
    from polyclinic.deployment.deployed_site import discreet

    return reason_of(error) if TOKEN in os.environ else discreet(str(kit))(error)


def sender(proxy: Any) -> Send:
    """How the engine sends to a site: TimeoutError where the site was not reached or did not answer, JobEnded where
    NVFlare has ended the job."""

    def send(what: str, payload: bytes, timeout: float) -> bytes:
        try:
            return proxy(timeout=timeout).call(what, payload)
        except CollabCallError as error:
            if error.remote_traceback is not None:  # it was reached, and raised
                raise RuntimeError(str(error.cause)) from None
            raise TimeoutError(str(error.cause)) from None
        except RunAborted:
            raise JobEnded(JOB_ENDED) from None

    return send


def is_present(cell: Any, site: str) -> bool:
    """Whether a site is connected to the server at all, in this job or not."""
    reply = cell.core_cell.send_request(
        channel="_net_manager", topic="peers", target=site, request=Message(), timeout=5.0
    )
    return reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK


#: before now: a hospital whose clock is behind must not find the certificate of the server not yet valid
ALREADY_VALID = datetime.timedelta(days=1)


class CertBuilder(cert.CertBuilder):
    """NVFlare's own, whose certificates are valid since yesterday."""

    @staticmethod
    def _generate_cert(*arguments: Any, **settings: Any) -> Any:
        begins = settings.get("not_valid_before") or datetime.datetime.now(datetime.UTC)
        settings["not_valid_before"] = begins - ALREADY_VALID
        return cert.CertBuilder._generate_cert(*arguments, **settings)
