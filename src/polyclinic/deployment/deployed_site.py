"""A deployed site: its child process works with the site's own images, policy and folder.

Of what the coordinator sends, only the study's settings count here: where images lie and what may leave is the site's
own business.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyclinic import __version__
from polyclinic.data.datasets.at_sites import AtSites
from polyclinic.data.names import refuse_unsafe_name
from polyclinic.data.own_images import load_site_plugins, own_data, own_source
from polyclinic.data.parts import PreparedSites
from polyclinic.deployment.site_config import policy_of
from polyclinic.engines.nvflare.process_tree import end_with
from polyclinic.engines.nvflare.relay import Relay
from polyclinic.engines.worker_process import WorkerProcess, python_command, reason_of
from polyclinic.errors import BadInput
from polyclinic.federation.host import SiteHost
from polyclinic.federation.leaving.gate import GateRefused
from polyclinic.federation.leaving.parcel import ParcelRejected
from polyclinic.files import atomic_write
from polyclinic.formats import write_run_format
from polyclinic.runner.assembly import Assembly
from polyclinic.runner.predict import card_of, model_file, preparation_of
from polyclinic.runner.release import digest_of_weights
from polyclinic.study import parse_study


def relay_of(job_spec: dict[str, Any], site: str, kit: Path) -> Relay:
    """The relay of a deployed site; BadInput if the site cannot take part."""
    if job_spec["version"] != __version__:
        raise BadInput(
            f"this site has polyclinic {__version__} and the coordinator {job_spec['version']}; "
            "install the same version on both"
        )
    end_with(os.getppid())  # who kills NVFlare's process at a site means the site
    threads = int(job_spec["study"]["engine"]["threads"])
    worker_spec = json.dumps({"study": job_spec["study"], "run": job_spec["run"], "site": site, "kit": str(kit)})
    command = python_command("polyclinic.deployment.worker", worker_spec)
    return Relay(site, lambda: WorkerProcess(command, threads=threads))


def discreet(kit: str) -> Callable[[BaseException], str]:
    """What a deployed site tells of its failures: what its gate refused, in the gate's words, and nothing else.

    Any other reason may name files or patients; it is written to `failures.log` in the site's kit.
    """

    def tell(error: BaseException) -> str:
        if isinstance(error, GateRefused | ParcelRejected):
            return reason_of(error)
        with (Path(kit) / "failures.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason_of(error)}\n")
        return f"{type(error).__name__} at the site; the reason is in failures.log of its kit"

    return tell


def deployed_host(worker_spec: dict[str, Any]) -> SiteHost:
    """In the child process: the host of this one site."""
    kit, site = Path(worker_spec["kit"]), worker_spec["site"]
    refuse_unsafe_name(worker_spec["run"])
    load_site_plugins(kit / "local" / "site.toml")
    study = parse_study(worker_spec["study"])
    torch.set_num_threads(study.engine.threads)
    if not isinstance(study.data, AtSites):
        raise BadInput("data.source: a deployed study has no data of its own; it must be 'at-sites'")
    policy = policy_of(kit / "local" / "policy.toml")
    data = own_data(kit / "local" / "site.toml", study.data, site, kit / "cache")
    names = study.sites.site_names()
    if site not in names:
        raise BadInput(f"sites.names: the study is not for '{site}', only for {', '.join(names)}")
    parts = PreparedSites(kit, names, study.data.info(names))
    assembly = Assembly(study, parts, kit / "runs" / worker_spec["run"], policy, lambda _: data)
    assembly.folder.mkdir(parents=True, exist_ok=True)
    write_run_format(assembly.folder)
    # what an audit at the site will need; the study's plug-ins are not the site's, and no command there may load them
    atomic_write(assembly.folder / "study.toml", study.model_copy(update={"plugins": ()}).to_toml())
    preparation = preparation_of(own_source(kit / "local" / "site.toml", study.data))
    spec = replace(assembly.host_spec(), keep_model=lambda weights: write_model(assembly, site, weights, preparation))
    return SiteHost(spec)


def write_model(assembly: Assembly, site: str, weights: Mapping[str, Tensor], preparation: Mapping[str, Any]) -> None:
    """Put the finished model into the site's own run folder, for `polyclinic predict`, which will prepare images as the
    site's were prepared."""
    study = assembly.study
    backbones = {"": study.model.backbones.get(site, study.model.backbone)}
    card = card_of(study, assembly.prepared.info, backbones, digest_of_weights(weights))
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    content = model_file(tensors, card.model_copy(update=dict(preparation)))
    atomic_write(assembly.folder / "model.safetensors", content)
