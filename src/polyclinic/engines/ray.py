"""The Ray engine: sites live in actors, on this machine or on a cluster, a bounded number of them at a time.

An actor serves many sites in turn: what they keep lies on disk between their turns, so that a thousand sites need no
more memory than two. Parcels travel through Ray's object store, one copy for all sites that receive the same one.
Only text and bytes are handed to Ray. On a cluster, run folder and cache must lie where every machine sees them.
"""

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from polyclinic.engines.pool import WorkerPool
from polyclinic.engines.worker_process import (
    STARTS_WITHIN,
    WorkerGone,
    cores,
    is_storage_failure,
    reason_of,
    storage_failure,
)
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.host import SiteHost
from polyclinic.federation.ledger.parcel import Parcel, decode
from polyclinic.federation.site import SitePosition, state_path, version_of

#: bytes of the object store of a Ray that is started here: parcels pass through it, nothing stays
STORE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Share:
    """What one actor takes of the machines, and how many actors there are at most."""

    actors: int | Literal["auto"] = "auto"
    threads: int = 1
    gpus: float = 0.0

    def actors_for(self, sites: int, resources: Mapping[str, float]) -> int:
        """As many actors as there are sites, or as the machines have room for; at least one."""
        room = int(resources.get("CPU", 1) // self.threads)
        if self.gpus:
            room = min(room, int(resources.get("GPU", 0) // self.gpus))
        if not room:
            have = f"{resources.get('CPU', 0):g} cores and {resources.get('GPU', 0):g} GPUs"
            raise BadInput(f"engine.gpus, engine.threads: no actor fits into the {have} of Ray; take smaller ones")
        return min(sites, room if self.actors == "auto" else min(self.actors, room))


class Ray(WorkerPool):
    """Starts Ray here, or joins the cluster at `address`, and leaves it at the end; takes one that runs as it is."""

    simulation = True

    def __init__(
        self,
        sites: tuple[str, ...],
        make_host: Callable[[str], SiteHost],
        worker_spec: str,
        folder: Path,
        *,
        share: Share,
        address: str | None = None,
        deadline: float | None = None,
    ) -> None:
        """`make_host(worker_spec)`, a function of a module, is called in every actor; `worker_spec` is text."""
        self.folder = folder
        self._connected = not _ray().is_initialized()
        if self._connected:
            self._connect(address, share.threads)
        try:
            lanes = share.actors_for(len(sites), _ray().cluster_resources())
        except BadInput:
            self._disconnect()
            raise
        actor = _ray().remote(SiteActor).options(num_cpus=share.threads, num_gpus=share.gpus, max_restarts=0)
        super().__init__(sites, lambda: RayWorker(actor.remote(make_host, worker_spec)), lanes=lanes, deadline=deadline)

    @staticmethod
    def _connect(address: str | None, threads: int) -> None:
        refuse_silent_address(address)
        if address is None:
            prepare_own_ray()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a hospital's machine tells nobody what it does
        here: dict[str, Any] = {"num_cpus": max(cores(), threads), "object_store_memory": STORE_BYTES}
        try:
            _ray().init(
                address=address or "local",
                include_dashboard=False if address is None else None,
                log_to_driver=False,
                logging_level="ERROR",
                **({} if address else here),
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            if address is None:
                raise WorkFailed(f"Ray did not start: {reason_of(error)}") from error
            raise BadInput(
                f"engine.address: no Ray cluster lets us in at '{address}': {reason_of(error)}; one that wants a token "
                "needs RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN set here, too"
            ) from None

    def call(self, calls: list[Call]) -> Iterator[Reply | Failure]:
        for parcel in (parcel for call in calls for parcel in call.parcels.values()):
            in_store(parcel)  # here and not in the lanes, which would each put the same weights there
        return self._call_workers(calls)

    def prune(self, positions: dict[str, SitePosition]) -> None:
        for site, position in positions.items():
            current = state_path(self.folder, site, position.version)
            for path in current.parent.glob("state-*.safetensors"):
                if version_of(path) < position.version:  # newer ones belong to the checkpoint after this one
                    path.unlink()

    def restore(self, positions: dict[str, SitePosition]) -> None:
        self._positions = dict(positions)
        super().close()

    def close(self) -> None:
        super().close()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connected:
            _ray().shutdown()


class RayWorker:
    """An actor as the engine sees it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, call: Call, deadline: float | None) -> tuple[Reply | Failure, SitePosition | None]:
        header = replace(call, parcels={}).to_bytes()
        parcels = [in_store(parcel) for parcel in call.parcels.values()]
        answer = self._result(self._actor.call.remote(header, [*call.parcels], *parcels), deadline)
        failed, position, reply, is_storage = answer
        if is_storage:
            raise storage_failure(call.site, failed)
        where = SitePosition(*position) if position else None
        return (Failure(call.site, call.operation, failed) if failed else Reply.from_bytes(reply, call)), where

    def restore(self, positions: Mapping[str, SitePosition]) -> None:
        where = {site: list(position) for site, position in positions.items()}
        if failed := self._result(self._actor.restore.remote(where), STARTS_WITHIN):
            raise WorkerGone(f"the site's process did not start: {failed}")

    def kill(self) -> None:
        _ray().kill(self._actor)

    @staticmethod
    def _result(reference: Any, deadline: float | None) -> Any:
        errors = _ray().exceptions
        try:
            return _ray().get(reference, timeout=deadline)
        except errors.GetTimeoutError:
            raise WorkerGone("no answer within the deadline (engine.deadline)") from None
        except errors.RayActorError as error:
            raise WorkerGone(f"the site's process died ({first_line(error)})") from None
        except errors.RayTaskError as error:
            raise WorkerGone(f"the site's process could not work: {first_line(error.cause)}") from None


def in_store(parcel: Parcel) -> Any:
    """The parcel's bytes in the object store: put there once, and gone when the parcel is."""
    kept = vars(parcel)
    if "in_store" not in kept:
        kept["in_store"] = _ray().put(parcel.encoded)
    return kept["in_store"]


class SiteActor:
    """Runs inside Ray: a host of sites. Answers are plain values and bytes; what a site raises is in its answer."""

    def __init__(self, make_host: Callable[[str], SiteHost], worker_spec: str) -> None:
        self._make_host = lambda: make_host(worker_spec)

    def restore(self, positions: Mapping[str, list[int]]) -> str | None:
        """Make the host, its sites where they stand; what went wrong, where something did."""
        try:
            self._host = self._make_host()
            self._host.restore({site: SitePosition(*where) for site, where in positions.items()})
            return None
        except Exception as error:
            return reason_of(error)

    def call(
        self, header: bytes, names: list[str], *parcels: bytes
    ) -> tuple[str | None, list[int] | None, bytes, bool]:
        """Why it failed, where the site stands, the reply, and whether files of the run are at fault."""
        try:
            received = {name: decode(data) for name, data in zip(names, parcels, strict=True)}
            call = replace(Call.from_bytes(header), parcels=received)
            reply = self._host.handle(call)
            return None, list(self._host.save(call.site)), reply.to_bytes(), False
        except Exception as error:
            return reason_of(error), None, b"", is_storage_failure(error)


def prepare_own_ray() -> None:
    """Settle what a Ray that is started here reads from the environment, unless the user has."""
    take_own_token()
    # Ray gives its workers a low priority (15): beside other work on the machine, sites would hardly train
    os.environ.setdefault("RAY_worker_niceness", "0")


def take_own_token() -> None:
    """A token for the Ray that is started here, unless the user has settled that by Ray's own variables.

    Otherwise Ray takes the one in the home folder, which this process may have read before it was changed, or which
    another Ray that starts at the same moment may overwrite: what is started here would then refuse us.
    """
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if given or os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    with suppress(ImportError):  # a Ray from before there were tokens
        from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

        AuthenticationTokenLoader.instance().reset_cache()


def refuse_silent_address(address: str | None) -> None:
    """BadInput if nothing listens at the address: Ray itself would wait for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise BadInput(f"engine.address: no Ray cluster answers at '{address}': {error.strerror or error}") from None


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise BadInput("engine.name: 'ray' needs the extra: pip install 'polyclinic[ray]'") from None
    return ray
