"""From a study and its sites' parts to the objects that do the work: trainer, host of sites, engine."""

import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from polyclinic import plugins
from polyclinic.data.labels import unknown_classes, without_classes
from polyclinic.data.parts import PreparedSites, SiteData, open_site
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.call import Expected, OneOf
from polyclinic.federation.collaborators import FederationSpec
from polyclinic.federation.host import SiteHost
from polyclinic.federation.ledger.keys import KeyRing
from polyclinic.federation.ledger.wire import ROUNDING
from polyclinic.federation.policy import Incoming, Policy
from polyclinic.federation.site import HostSpec
from polyclinic.files import atomic_write, read_json
from polyclinic.json_types import JsonObject
from polyclinic.models import (
    PUBLIC,
    RANDOM,
    Backbone,
    Fitted,
    WeightsFile,
    build,
    find_weights,
    initial_weights,
    is_importable,
)
from polyclinic.models.imported import sides_of
from polyclinic.randomness import seed_of
from polyclinic.runner.run.machine import device_of, fix_order_of_sums, keep_freed_memory, precision_of, record_steps
from polyclinic.runner.run.method import more_operations
from polyclinic.study import Study, parse_study
from polyclinic.study.checks import check_names_of_sites
from polyclinic.tasks import Target
from polyclinic.training.loop import Trainer, TrainerSpec
from polyclinic.training.optimizer import Optimizer

#: of the run folder: the file of the first weights, where they come from one, and what of it was taken over
WEIGHTS = "weights.json"


@dataclass(frozen=True)
class Assembly:
    """Builds everything one run consists of. `folder` is the run folder.

    `policy` and `open_data` are a deployed site's own; simulated sites take them from the study and the prepared data.
    """

    study: Study
    prepared: PreparedSites
    folder: Path
    policy: Policy | None = None
    open_data: Callable[[str], SiteData] | None = None
    #: the coordinator's keys in a deployed run
    keys: KeyRing | None = None
    #: where a deployed site keeps files of weights that its people trust
    trusted_weights: Path | None = None

    @cached_property
    def target(self) -> Target:
        info = self.prepared.info
        bounds = tuple(info["label_range"]) if info["label_range"] else None
        structures = tuple((name, tuple(values)) for name, values in info.get("structures", {}).items())
        return Target(tuple(info["classes"]), info["unit"], bounds, structures)

    @cached_property
    def backbones(self) -> dict[str, str]:
        """The networks of sites that have another one than `model.backbone`."""
        self.check_site_names()
        model = self.study.model
        return {site: name for site, name in model.backbones.items() if name != model.backbone}

    @cached_property
    def optimizer(self) -> Optimizer:
        """The study's table [optimizer], for a run of its rounds."""
        return self.study.optimizer.over(self.study.method.rounds, fused=not self.study.engine.reproducible)

    @cached_property
    def optimizers(self) -> dict[str, Optimizer]:
        """The settings of sites whose batch size is another one than `optimizer.batch_size`."""
        optimizer = self.optimizer
        found = {site: optimizer.at_site(site) for site in optimizer.batch_sizes}
        return {site: own for site, own in found.items() if own is not optimizer}

    def check_site_names(self) -> None:
        """BadInput where a setting by site names one that there is not."""
        check_names_of_sites(self.study, self.prepared.names)

    def build_model(self, backbone: str | None = None) -> Backbone:
        info, model = self.prepared.info, self.study.model
        return build(
            backbone or model.backbone,
            channels=info["channels"],
            outputs=self.study.task.outputs(self.target),
            size=info["size"],
            norm=model.norm,
            arguments=model.arguments if backbone is None or is_importable(backbone) else None,
            input_size=model.input_size,
            freeze=model.freeze if backbone is None else None,
            head=self.study.method.head,
        )

    @cached_property
    def _initial(self) -> dict[str, Tensor]:
        return self._initial_of(None)

    def _initial_of(self, backbone: str | None) -> dict[str, Tensor]:
        if backbone is None and self.from_file:
            return self.from_file.weights
        return self._drawn(backbone)

    def _drawn(self, backbone: str | None) -> dict[str, Tensor]:
        return initial_weights(lambda: self.build_model(backbone), seed_of(self.study.seed, "initial weights"))

    @cached_property
    def weights_file(self) -> WeightsFile | None:
        """The file or the public weights of `model.weights`, which must be those that the run was begun with.

        A deployed site has none: it reads no file that a study names, and the weights come from the coordinator.
        """
        is_deployed_site = self.policy is not None or self.open_data is not None
        if self.study.model.weights == RANDOM or is_deployed_site:
            return None
        model, noted = self.study.model, self.folder / WEIGHTS
        size = model.input_size or self.prepared.info["size"]
        file = find_weights(model.weights, model.backbone, size=size, arguments=model.arguments)
        if file is None:
            return None
        if model.weights_sha256 not in (None, file.sha256):
            raise BadInput(f"model.weights_sha256: '{file.path}' has another SHA-256; name the file that is meant")
        if noted.exists() and read_json(noted).get("sha256") != file.sha256:
            raise BadInput(
                f"model.weights: '{file.path}' is not the file that {self.folder} was begun with; bring that one "
                "back, or name another folder"
            )
        return file

    @cached_property
    def from_file(self) -> Fitted | None:
        """The first weights where they come from a file; sites with another network (`model.backbones`) draw theirs."""
        file = self.weights_file
        return file.fitted(self._drawn(None), self.study.model.backbone) if file else None

    def initial_weights(self, backbone: str | None = None) -> dict[str, Tensor]:
        """The weights every site and the coordinator start from; the same for the same study and seed."""
        weights = self._initial if backbone is None else self._initial_of(backbone)
        return {name: tensor.clone() for name, tensor in weights.items()}

    def first_weights(self, site: str) -> dict[str, Tensor] | None:
        """The weights that a site's network begins with; None where a file gives them that a deployed site lacks."""
        backbone = self.backbones.get(site)
        if backbone is None and self.study.model.weights != RANDOM:
            file = self.weights_file or self.known_weights()
            return file.fitted(self._drawn(None), self.study.model.backbone).weights if file else None
        return self.initial_weights(backbone)

    def known_weights(self) -> WeightsFile | None:
        """The public weights that a study begins with, or the file of its SHA-256 among those that a deployed site's
        people trust; None where the site has none of these."""
        model = self.study.model
        size = model.input_size or self.prepared.info["size"]
        path = trusted_file(self.trusted_weights, model.weights_sha256)
        weights = model.weights if model.weights == PUBLIC else None if path is None else str(path)
        try:
            found = weights and find_weights(weights, model.backbone, size=size, arguments=model.arguments)
        except BadInput:  # not installed here, or of another network
            return None
        return found or None

    def note_weights(self) -> str | None:
        """Write into the run folder which file the weights are from, and what the network took over.

        Returns a sentence about it; None, and nothing is written, where weights are drawn.
        """
        file, fitted = self.weights_file, self.from_file
        if file is None or fitted is None:
            return None
        content = {"file": file.path.name, "sha256": file.sha256, **fitted.report()}
        atomic_write(self.folder / WEIGHTS, json.dumps(content, indent=1) + "\n")
        return f"first weights from {file.path}: {fitted.sentence()}"

    def trainer(self, backbone: str | None = None) -> Trainer:
        """What a site with this network (by default the study's) trains with."""
        study, model = self.study, self.build_model(backbone)
        device = device_of(study.engine.device)
        if study.engine.reproducible and device != "cpu":
            fix_order_of_sums()
        alone = study.engine.reproducible or study.federation.label_sets or study.data.volumes
        spec = TrainerSpec(
            task=study.task,
            target=self.target,
            optimizer=self.optimizer,
            cut=study.cut,
            local_names=study.method.local_names(model, study.model.batch_norm),
            initial=self._initial if backbone is None else self._initial_of(backbone),
            device=device,
            precision=precision_of(study.engine.precision, device),
            privacy=study.privacy,
            graphs=record_steps(study.engine, device) and not study.data.volumes,
            stacked="never" if alone else study.engine.stacked,
            patch=tuple(self.prepared.info["size"]) if study.data.volumes else (),
            weights_stay=self.weights_device != "cpu",
            bounded_scores=self.policy is not None and self.policy.scores == "coarse",
            metric=study.evaluation.metric,
            frozen_features=study.method.traits.takes_frozen_features and (study.replay is None or study.in_latents),
        )
        if not study.data.volumes:
            return Trainer(model, spec)
        from polyclinic.training.volumes import VolumeTrainer

        return VolumeTrainer(model, spec)

    @cached_property
    def weights_device(self) -> str:
        """Where weights lie between sites and coordinator: on the GPU, if all of them are simulated in this process and
        the method takes weights from there; else on the CPU, from where they can go on as bytes."""
        engine = self.study.engine
        one_process = engine.name == "in-process" and engine.workers in (1, "auto") and engine.deadline is None
        open_sum = self.study.federation.sum == "float"
        simulated = open_sum and self.policy is None and self.open_data is None and self.study.defence is None
        stay = one_process and simulated and self.study.method.traits.weights_stay
        return device_of(engine.device) if stay else "cpu"

    @cached_property
    def expected(self) -> Mapping[str, Expected]:
        """What weights and gradients look like, for whoever receives some: never more than the network has."""
        networks = [self._initial, *(self._initial_of(name) for name in dict.fromkeys(self.backbones.values()))]
        choices = tuple(Expected.like("weights", network, partial=True) for network in networks)
        weights = choices[0] if len(choices) == 1 else OneOf("weights", choices=choices)
        return {"weights": weights, "gradients": Expected("gradients", max_bytes=2**31)}

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Channels and sides of the images, or of patches of volumes."""
        info = self.prepared.info
        return info["channels"], *sides_of(info["size"])

    def federation_spec(self, trainer: Trainer) -> FederationSpec:
        """What the coordinator works with; `trainer` is its own."""
        return FederationSpec(
            study=self.study,
            sites=self.prepared.names,
            folder=self.folder,
            initial=self._initial,
            device=self.weights_device,
            expected=self.expected,
            image_shape=self.image_shape,
            trainer=trainer,
            backbones=self.backbones,
            keys=self.keys,
        )

    def open_images(self) -> Callable[[str], SiteData]:
        """Opens a site's images: a deployed site's own, or those that were prepared for it; changed where the study
        wants that."""
        opened, study = self.open_data or partial(open_site, self.prepared.folder), self.study
        if study.evaluation.final == "test" and not (study.poisoning or self.unknown_classes):
            return opened

        def changed(site: str) -> SiteData:
            data = opened(site)
            if study.poisoning:
                data = study.poisoning.data(data, len(self.prepared.info["classes"]), study.seed)
            if site in self.unknown_classes:
                data = without_classes(data, self.unknown_classes[site])
            return data if study.evaluation.final == "test" else data.without_test()

        return changed

    @cached_property
    def unknown_classes(self) -> dict[str, tuple[int, ...]]:
        """Classes, by number, that a site does not know; BadInput where the table names others than there are."""
        return unknown_classes(self.study.federation.label_sets, self.prepared.names, self.target.classes)

    def host(self) -> SiteHost:
        return SiteHost(self.host_spec())

    def host_spec(self) -> HostSpec:
        """What the sites of a process work with."""
        usual = self.trainer()
        networks = {name: self.trainer(name) for name in dict.fromkeys(self.backbones.values())}
        trainers = {site: networks[name] for site, name in self.backbones.items()}
        for site, optimizer in self.optimizers.items():
            trainers[site] = trainers.get(site, usual).with_optimizer(optimizer)
        archive = None
        if self.study.audit:
            from polyclinic.federation.ledger.archive import ParcelArchive

            archive = ParcelArchive(self.study.audit.keep_parcels, self.study.seed)
        return HostSpec(
            study=self.study,
            trainer=usual,
            trainers=trainers,
            folder=self.folder,
            open_data=self.open_images(),
            policy=self.policy or self._simulated_policy(),
            expected=self.expected,
            first_weights=self.first_weights,
            archive=archive,
            result_settings_json=self.result_settings_json,
            more_operations=more_operations(self.study, self.first_weights),
        )

    def _simulated_policy(self) -> Policy:
        chosen = self.study.policy
        incoming = chosen.incoming or Incoming(on=False)
        allowed = Policy(kinds=chosen.kinds, incoming=incoming, shares=chosen.shares, few_images="allow")
        return allowed.model_copy(update={"scores": chosen.scores})

    @property
    def result_settings_json(self) -> str:
        """All settings that results depend on, as JSON: the whole study but for its format and its engine."""
        tables = {name: table for name, table in self.study.as_tables().items() if name not in ("format", "engine")}
        if self.study.engine.wire in ROUNDING:  # of the engine, it alone changes results
            tables["engine"] = {"wire": self.study.engine.wire}
        if self.study.plugins:  # what they are, not where they lie
            found = plugins.load_from_study(self.study.plugins)
            tables["plugins"] = list(found.values()) or [Path(name).name for name in self.study.plugins]
        if self.weights_file:
            tables["model"]["weights"] = self.weights_file.sha256
        return json.dumps(tables, sort_keys=True)

    @cached_property
    def worker_spec(self) -> str:
        """What another process needs to build the same assembly: JSON, for `assemble_from`."""
        places = {"parts": str(self.prepared.folder), "folder": str(self.folder)}
        spec: JsonObject = {"study": self.study.as_tables(), **places}
        if self.study.plugins:  # found where they were found here, and refused if they have changed since
            spec["digests"] = plugins.load_from_study(self.study.plugins)
            spec["modules"] = plugins.folders(self.study.plugins)
        if self.weights_file and self.study.model.weights != PUBLIC:
            spec["study"]["model"]["weights"] = str(self.weights_file.path.expanduser().resolve())
        return json.dumps(spec)


def assemble_from(worker_spec: str) -> Assembly:
    """The assembly that a worker process builds from its `worker_spec`."""
    spec = json.loads(worker_spec)
    folder = Path(spec["parts"])
    if not (folder / "info.json").is_file():
        raise WorkFailed(
            f"machine '{socket.gethostname()}' does not see '{folder}'; put the run folder and POLYCLINIC_CACHE where "
            "every machine of the cluster sees them"
        )
    info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
    parts = PreparedSites(folder, tuple(info["counts"]), info)
    sys.path += [place for place in spec.get("modules", []) if place not in sys.path]
    plugins.load(spec["study"].get("plugins", []), spec.get("digests"))
    return Assembly(parse_study(spec["study"]), parts, Path(spec["folder"]))


def host_from(worker_spec: str) -> SiteHost:
    """The host of sites that a worker process runs; the process computes with the study's threads."""
    assembly = assemble_from(worker_spec)
    workers = assembly.study.engine.workers
    keep_freed_memory(workers if isinstance(workers, int) else os.cpu_count() or 1)
    torch.set_num_threads(assembly.study.engine.threads)
    return assembly.host()


def trusted_file(folder: Path | None, sha256: str | None) -> Path | None:
    """The file of this SHA-256 in a folder, if there is one."""
    inside = folder.iterdir() if folder is not None and folder.is_dir() else ()
    files = sorted(path for path in inside if path.is_file())
    found = [file for file in files if sha256 and hashlib.sha256(file.read_bytes()).hexdigest() == sha256]
    return found[0] if found else None
