"""A deployed site: its child process works with the site's own images, policy and folder.

Of what the coordinator sends, only the study's settings count here: where images lie and what may leave is the site's
own business.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyclinic import __version__, plugins
from polyclinic.data.allowed_paths import folder_name
from polyclinic.data.own_images import load_site_plugins, only_site_plugins, own_data, own_source
from polyclinic.data.parts import ImageSet, PreparedSites
from polyclinic.data.source import AtSites
from polyclinic.deployment.approval import TOLD, TRUSTED_WEIGHTS, Approvals, NotApproved, Request, State
from polyclinic.deployment.approval_rules import NameTaken, policy_of
from polyclinic.deployment.confirmation import confirmation_of
from polyclinic.engines.nvflare.job import end_with
from polyclinic.engines.nvflare.relay import Relay, refusal
from polyclinic.engines.worker_process import WorkerGone, WorkerProcess, python_command, read_spec, reason_of, serve
from polyclinic.errors import BadInput
from polyclinic.federation.call import DataDependentRefusal, GateRefused, pack, unpack
from polyclinic.federation.host import SiteHost
from polyclinic.federation.layers.interface import SiteLayer
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.keys import KitKeys, head_from_json, signer_of_line
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import LedgerBroken, check_head, verify
from polyclinic.federation.policy import Policy
from polyclinic.federation.site import Kit
from polyclinic.files import atomic_write, lock, read_json
from polyclinic.run_folder import ENDS_WITHIN, write_run_format
from polyclinic.runner.evaluate.calibration import Calibration, calibrate_on, looks_of
from polyclinic.runner.predict.model_file import card_of, digest_of_weights, model_file, preparation_of
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.run import note_plugins
from polyclinic.study import Study, load_run_study, parse_study
from polyclinic.tasks.task import Task

#: sets of prepared images, and generators, that a kit keeps
MOST_CACHED = 32
#: what the coordinator hears of every failure whose reason stays at the site
FAILED = "the site could not do this; its own people find the reason in failures.log of its kit"


class OtherVersion(BadInput):
    """Site and coordinator have different versions of the package."""


def relay_of(job_spec: dict[str, Any], site: str, kit: Path, leave: Callable[[], None] = lambda: None) -> Relay:
    """The relay of a deployed site; BadInput if the site cannot take part. `leave` is called when it is stopped."""
    if job_spec["version"] != __version__:
        raise OtherVersion(
            f"this site has polyclinic {__version__} and the coordinator {job_spec['version']}; "
            "install the same version on both"
        )
    end_with(os.getppid(), leave)  # who kills NVFlare's process at a site means the site
    confirmation_of(kit)
    run = folder_name(job_spec["run"])
    approvals = Approvals(kit, site)
    with only_site_plugins(kit / "runs" / run):
        study = parse_study(job_spec["study"])
    request = approvals.request(run, study, job_spec["version"])
    threads = own_threads(request)
    worker_spec = json.dumps({"study": job_spec["study"], "run": job_spec["run"], "site": site, "kit": str(kit)})
    command = python_command("polyclinic.deployment.deployed_site")
    start_worker = lambda: WorkerProcess(command, threads=threads, spec=worker_spec)  # noqa: E731
    notice = lambda seen: notice_put_back(kit, site, run, seen)  # noqa: E731
    return ApprovedRelay(site, start_worker, discreet(str(kit)), lambda: approvals.require(run), notice)


class ApprovedRelay(Relay):
    """A relay that passes on nothing, neither a call nor an answer, of a study that the site's people do not let run.

    Its answer to a ping says whether the study waits for them: so a coordinator can wait, too."""

    def __init__(
        self, site: str, start_worker: Any, tell: Any, require_approval: Callable[[], None], notice: Any = None
    ) -> None:
        super().__init__(site, start_worker, tell)
        self._require_approval = require_approval
        self._notice = notice
        self._seen: dict[str, Any] = {}  # what the coordinator knows of the site's ledgers

    def handle(self, what: str, payload: bytes) -> bytes:
        if what == "ping" and self._notice and (seen := unpack(payload)[0].get("seen", {})) != self._seen:
            self._notice(seen)
            self._seen = seen
        state: State = "approved"
        try:
            self._require_approval()
        except NotApproved as waits:
            state = waits.state
        if what == "ping":
            return pack({"site": self.site, "approval": state}, [])
        if state == "approved":
            return super().handle(what, payload)
        self.close()  # what it works on must not be finished
        return refusal(TOLD[state])


def notice_put_back(kit: Path, site: str, run: str, seen: Mapping[str, Any]) -> None:
    """Suspend the site where the coordinator knows, by a line that the site has signed, of a later end of one of its
    ledgers: a backup was put back as a whole. `seen` are lines, digest and signature by run; each end is said once."""
    file, keys = kit / "anchors" / "put_back.json", KitKeys(kit / "local").verifying_keys(site)
    said = read_json(file) if file.exists() else {}
    for name, value in seen.items():
        head, ledger = head_from_json(value), kit / "runs" / folder_name(name) / "ledger" / f"{site}.jsonl"
        if head.lines <= said.get(name, 0) or signer_of_line(keys, head.digest, head.signature) is None:
            continue
        try:
            lines = verify(ledger, torn=True) if ledger.exists() else []
            check_head(head, ledger, [line["digest_of_line"] for line in lines], "the coordinator")
        except LedgerBroken as error:
            said[name] = head.lines
            file.parent.mkdir(mode=0o700, exist_ok=True)
            atomic_write(file, json.dumps(said) + "\n", private=True, durable=True)
            Suspensions(kit).suspend(run, f"{error}. Until then your budgets do not count what left since that backup")


def discreet(kit: str) -> Callable[[BaseException], str]:
    """What a deployed site tells the coordinator of its failures: what its policy refuses or what does not fit the
    study, in these words, and otherwise one sentence that is always the same.

    Any other reason may name files or patients, or depend on images. The site's own people find all of them in
    `failures.log` of the kit.
    """

    def tell(error: BaseException) -> str:
        private = lambda path, flags: os.open(path, flags, 0o600)  # noqa: E731
        with open(Path(kit) / "failures.log", "a", encoding="utf-8", opener=private) as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason_of(error)}\n")
        told = isinstance(error, GateRefused | ParcelRejected | OtherVersion | WorkerGone | NotApproved | NameTaken)
        return reason_of(error) if told and not isinstance(error, DataDependentRefusal) else FAILED

    return tell


@contextlib.contextmanager
def held_run(worker_spec: dict[str, Any], wait: float = ENDS_WITHIN) -> Iterator[None]:
    """Hold a run of this site: two processes with one ledger would each count only what they release themselves.

    A process that was killed takes a moment to end, for which the next one waits.
    """
    runs, run = Path(worker_spec["kit"]) / "runs", folder_name(worker_spec["run"])
    runs.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with lock(runs / f".{run}.lock", wait=wait):
            yield
    except TimeoutError:
        raise BadInput(f"another process of this site works on run '{run}'; stop that one") from None


def deployed_host(worker_spec: dict[str, Any]) -> SiteHost:
    """In the child process: the host of this one site."""
    kit, site, run = Path(worker_spec["kit"]), worker_spec["site"], folder_name(worker_spec["run"])
    confirmation_of(kit)
    load_site_plugins(kit / "local" / "site.toml")
    study = parse_study(worker_spec["study"])
    if not isinstance(study.data, AtSites):
        raise BadInput("data.source: a deployed study has no data of its own; it must be 'at-sites'")
    names = study.sites.site_names()
    if site not in names:
        raise BadInput(f"sites.names: the study is not for '{site}', only for {', '.join(names)}")
    policy = policy_of(kit / "local" / "policy.toml")
    refuse_unbounded_scores(study.task, policy)
    refuse_other_study(kit / "runs" / run, study)
    approvals = Approvals(kit, site)
    torch.set_num_threads(own_threads(approvals.request(run, study, __version__)))
    approvals.require(run)
    data = own_data(kit / "local" / "site.toml", study.data, site, kit / "cache")
    bound_cache(kit / "cache")
    parts = PreparedSites(kit, names, study.data.info(names))
    trusted = kit / TRUSTED_WEIGHTS
    assembly = Assembly(study, parts, kit / "runs" / run, policy, lambda _: data, trusted_weights=trusted)
    assembly.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_run_format(assembly.folder)
    note_plugins(assembly.folder, study)
    # what an audit at the site will need; the study's plug-ins are not the site's, and no command there may load them
    atomic_write(assembly.folder / "study.toml", study.model_copy(update={"plugins": ()}).to_toml())
    preparation = preparation_of(own_source(kit / "local" / "site.toml", study.data))
    own = Kit(
        site=site,
        suspensions=Suspensions(kit),
        require_approval=lambda: approvals.require(run),
        keys=KitKeys(kit / "local"),
        anchors=kit / "anchors" / "runs",
        cache=kit / "cache",
        keep_model=lambda weights: write_model(assembly, site, weights, preparation, data.validation),
        layers=own_layers(),
    )
    return SiteHost(replace(assembly.host_spec(), kit=own))


def own_layers() -> tuple[SiteLayer, ...]:
    """The layers of the plug-ins that the site's people list in site.toml (`LAYERS`: name -> class). BadInput where one
    of them cannot be used: a site that believes it has a layer must have it."""
    found = []
    for plugin, loaded in plugins.LOADED.items():
        listed = getattr(loaded.module, "LAYERS", {})
        if not isinstance(listed, Mapping):
            raise BadInput(f"plugins: LAYERS in {plugin} must be a dict of names and classes")
        written = [one for one in vars(loaded.module).values() if isinstance(one, type) and issubclass(one, SiteLayer)]
        for kind in written:
            if kind is not SiteLayer and kind not in listed.values():
                raise BadInput(f"plugins: {plugin} has a layer {kind.__name__} that is not in its dict LAYERS")
        for name, kind in listed.items():
            try:
                layer = kind()
            except Exception as error:
                raise BadInput(
                    f"plugins: {plugin} has a layer '{name}' that cannot be made: {reason_of(error)}"
                ) from None
            if not isinstance(layer, SiteLayer):
                raise BadInput(f"plugins: {plugin} has a layer '{name}' that is no polyclinic.SiteLayer")
            steps = ("arriving", "leaving", "left")
            if all(getattr(type(layer), step) is getattr(SiteLayer, step) for step in steps):
                raise BadInput(f"plugins: {plugin} has a layer '{name}' with none of {', '.join(steps)}: sees nothing")
            found.append(layer)
    return tuple(found)


def bound_cache(cache: Path) -> None:
    """Delete what was prepared first, where more is kept than `MOST_CACHED`: a study that needs it makes it again."""
    folders = [one for one in (cache / "parts").glob("[!.]*") if one.is_dir()]
    for kept in (folders, (cache / "generators").glob("*.safetensors")):
        for old in sorted(kept, key=lambda path: path.stat().st_mtime, reverse=True)[MOST_CACHED:]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def own_threads(request: Request) -> int:
    """Threads that the site computes with: as the study had them when it first came, which is what was shown and
    approved, and no more than the machine has cores. They are part of a result's last bits."""
    return min(int(request.study["engine"]["threads"]), os.cpu_count() or 1)


def refuse_unbounded_scores(task: Task, policy: Policy) -> None:
    """BadInput for a task of a plug-in that does not say how much one image can add to its scores."""
    says = type(task).coarse is not Task.coarse or type(task).bounds is not Task.bounds
    if policy.scores == "coarse" and not says:
        raise BadInput(
            f"task.name: '{task.name}' has no `bounds` of its scores, without which none leaves coarsely; add them, "
            "or set scores = 'fine' in policy.toml"
        )


def refuse_other_study(folder: Path, study: Study) -> None:
    """BadInput if the run of this name was begun with another study: what that one kept here might leave by this one.

    The site compares by itself, whatever the coordinator says about a resumed run."""
    if not (folder / "study.toml").exists():
        return
    before, now = load_run_study(folder).as_tables(), study.as_tables()
    for table in before | now:
        if table not in ("format", "engine", "plugins") and before.get(table) != now.get(table):
            raise BadInput(f"{table}: differs from the study that run '{folder.name}' was begun with at this site")


def write_model(
    assembly: Assembly, site: str, weights: Mapping[str, Tensor], preparation: Mapping[str, Any], validation: ImageSet
) -> None:
    """Put the finished model into the site's own run folder, for `polyclinic predict`, which will prepare images as the
    site's were prepared, and give probabilities that are calibrated on the site's validation images."""
    study = assembly.study
    backbones = {"": study.model.backbones.get(site, study.model.backbone)}
    calibration = _own_calibration(assembly, site, weights, validation)
    calibrations = {"": calibration} if calibration else {}
    looks = looks_of([validation.images])
    card = card_of(study, assembly.prepared.info, backbones, digest_of_weights(weights), calibrations, looks)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    content = model_file(tensors, card.model_copy(update=dict(preparation)))
    atomic_write(assembly.folder / "model.safetensors", content)


def _own_calibration(
    assembly: Assembly, site: str, weights: Mapping[str, Tensor], validation: ImageSet
) -> Calibration | None:
    """What the site's validation images say about the model; it stays here. Whatever goes wrong in this, the model is
    kept: a coordinator must not learn from a failure how the images are."""
    try:
        trainer = assembly.trainer(assembly.study.model.backbones.get(site))
        trainer.load(weights)
        return calibrate_on(trainer, validation)
    except Exception:
        return None


def main() -> None:
    os.umask(0o077)  # what a site writes is for its own people only
    worker_spec = json.loads(read_spec())
    with contextlib.ExitStack() as held:

        def make_host() -> SiteHost:
            held.enter_context(held_run(worker_spec))
            return deployed_host(worker_spec)

        serve(make_host, discreet(worker_spec["kit"]))


if __name__ == "__main__":
    main()
