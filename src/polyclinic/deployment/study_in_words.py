"""A study in plain sentences, for the person at a site who approves it: what would leave, how often, to whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from polyclinic.data.own_images import count_training_images, split_in_words
from polyclinic.data.parts import PreparedSites
from polyclinic.data.source import AtSites
from polyclinic.deployment.approval import TRUSTED_WEIGHTS
from polyclinic.deployment.approval_rules import changed_settings, trusted_tensors
from polyclinic.errors import BadInput
from polyclinic.federation.layers.gate import model_bytes
from polyclinic.federation.layers.sealing import KeyExchange
from polyclinic.federation.ledger.budget import SCORES
from polyclinic.federation.ledger.kinds import OF_NO_IMAGE
from polyclinic.federation.operation import Operation
from polyclinic.federation.policy import Policy
from polyclinic.federation.sums.settings import Floor
from polyclinic.federation.sums.site_sums import SiteSums
from polyclinic.files import human_bytes
from polyclinic.json_types import JsonObject
from polyclinic.methods.analytic import Analytic
from polyclinic.methods.shared.local_training import LocalWork
from polyclinic.models import PUBLIC, RANDOM
from polyclinic.privacy.epsilon import compute_epsilon, sampling_rate_for
from polyclinic.questions.evaluate import EvaluateOnly
from polyclinic.runner.run.assembly import Assembly, trusted_file
from polyclinic.runner.run.method import more_operations
from polyclinic.study import Study, parse_study

#: kinds of parcel that are trained with differential privacy where `privacy.on` names the network
COVERED = {
    "classifier": ("weights", "gradients"),
    "encoder": (),
    "primary": (),
    "generator": ("generator", "synthetic-images"),
    "prior": ("generator", "synthetic-images"),
}
#: kinds whose size is that of the model
AS_LARGE_AS_THE_MODEL = ("weights", "gradients", "masked")


@dataclass(frozen=True)
class Asked:
    """A study as one site sees it; the plug-ins of the site must be loaded."""

    study: Study
    site: str
    kit: Path
    policy: Policy

    def sentences(self, last: JsonObject | None) -> list[str]:
        """Everything a person should know before approving; `last` is the study that was approved last."""
        return [
            *self.about(),
            "",
            "What the coordinator may ask of this site:",
            *(f"- {line}" for line in self.operations()),
            "It may also have any of this sealed for another site.",
            "",
            *self.how_often(),
            *self.bytes(),
            *self.scores(),
            *self.privacy(),
            "",
            *unusual_settings(self.study),
            "",
            *new_against(last, self.study),
        ]

    def about(self) -> list[str]:
        study, data = self.study, self.study.data
        dataset = data.dataset if isinstance(data, AtSites) else "no dataset of yours"
        others = [name for name in study.sites.site_names() if name != self.site]
        network = f"{study.model.backbone} for {study.task.name}"
        return [
            f"Method {study.method.name} ({study.method.summary}).",
            f"It trains the network {network} on your images '{dataset}'.",
            f"The other sites are {', '.join(others) or 'none'}.",
            *([self._split(data)] if isinstance(data, AtSites) else []),
            *self.first_weights(),
            *self.second_model(),
            *self.worth(),
        ]

    def first_weights(self) -> list[str]:
        """Where the first weights come from, if they are not drawn."""
        model = self.study.model
        if model.weights == RANDOM:
            return []
        if model.weights == PUBLIC:
            return ["It begins with public weights out of a package, which your site compares if it has the package."]
        name = f"It begins with weights from the file '{Path(model.weights).name}'"
        if model.weights_sha256 is None:
            return [f"{name}, of which nothing is known. Whoever chose it may have crafted it."]
        known = trusted_file(self.kit / TRUSTED_WEIGHTS, model.weights_sha256)
        if known is not None:
            return [f"{name} with the SHA-256 {model.weights_sha256}: your site has it as {known.name} and compares."]
        return [
            f"{name} with the SHA-256 {model.weights_sha256}, which your site does not have: what comes first is taken "
            f"as it is. Ask where the file is from, and put it into {TRUSTED_WEIGHTS} of your kit if you trust it."
        ]

    def second_model(self) -> list[str]:
        """The model that the first one is compared with, if there is one."""
        method = self.study.method
        if not isinstance(method, EvaluateOnly) or not (method.against or method.against_digest):
            return []
        name = f"It compares them, on your test images, with the model in the file '{Path(method.against or '').name}'"
        known = trusted_tensors(self.kit / TRUSTED_WEIGHTS, method.against_digest)
        if known is not None:
            return [f"{name}: your site has it as {known.name}."]
        return [
            f"{name}, which your site does not have. Ask where it is from, and put it into {TRUSTED_WEIGHTS} of your "
            "kit if you trust it."
        ]

    def worth(self) -> list[str]:
        if not isinstance(self.study.method, Analytic) or not self.study.method.worth:
            return []
        return [
            "It also wants sums of products over your validation images, and tells what each site adds to the model."
        ]

    def _split(self, data: AtSites) -> str:
        try:
            return split_in_words(self._site_file, data)
        except BadInput as error:
            return f"It cannot run at this site as it is: {error}."

    @property
    def _site_file(self) -> Path:
        return self.kit / "local" / "site.toml"

    def operations(self) -> Iterator[str]:
        """What may leave by each operation, and to whom."""
        for name, declared, purpose in operations_of(self.study):
            about = f"{name} ({purpose})" if purpose else name
            if declared.partner == "simulator":
                yield f"{about}: exists in simulation only, and this site refuses it."
            elif not declared.releases:
                yield f"{about}: nothing leaves."
            else:
                yield f"{about}: {', '.join(declared.releases)}, {_receiver(declared)}.{self._refused(declared)}"

    def _refused(self, declared: Operation) -> str:
        refused = [kind for kind in declared.releases if kind not in self.policy.kinds]
        return f" Your policy keeps {', '.join(refused)} back, so this fails where it is needed." if refused else ""

    def how_often(self) -> list[str]:
        rounds = self.study.method.rounds
        return [
            f"The study has {rounds} rounds. The coordinator may ask for an operation more than once in a round; "
            "scores leave once a round, and once more at the end."
        ]

    def bytes(self) -> list[str]:
        """An estimate for what has the size of the model; nothing is said of kinds whose size hangs on images."""
        limit = self.policy.max_bytes
        most = f"Your policy stops everything after {limit} bytes." if limit is not None else ""
        kinds = {kind for _, declared, _ in operations_of(self.study) for kind in declared.releases}
        if not kinds & set(AS_LARGE_AS_THE_MODEL):
            return [f"How many bytes leave is not known before. {most}".strip()]
        one = self.model_bytes()
        return [
            f"The model has about {one:,} bytes: {one * self.study.method.rounds:,} bytes if it leaves once a round. "
            f"Other kinds come on top. {most}".strip()
        ]

    def model_bytes(self) -> int:
        names = self.study.sites.site_names()
        assert isinstance(self.study.data, AtSites)
        parts = PreparedSites(self.kit, names, self.study.data.info(names))
        assembly = Assembly(self.study, parts, self.kit / "runs", self.policy)
        backbone = self.study.model.backbones.get(self.site)
        tensors = assembly.build_model(backbone).state_dict().values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def scores(self) -> list[str]:
        if not any(SCORES in declared.releases for _, declared, _ in operations_of(self.study)):
            return ["No scores on your images leave."]
        coarse = "rounded, without small counts" if self.policy.scores == "coarse" else "exactly as they are"
        return [f"Scores of models on your validation and test images leave, {coarse} (scores in policy.toml)."]

    def privacy(self) -> list[str]:
        privacy = self.study.privacy
        if privacy is None:
            return ["There is no differential privacy: nothing limits what a model may remember of an image."]
        return [
            f"Differential privacy is on {', '.join(privacy.on)}, with noise {privacy.noise_multiplier:g} and "
            f"clipping norm {privacy.max_grad_norm:g}. {self._epsilon()}",
            f"It does not cover {self._uncovered()}.",
        ]

    def _epsilon(self) -> str:
        """Epsilon by the study's own settings, at the delta that this site counts with."""
        study, privacy = self.study, self.study.privacy
        assert privacy is not None
        if privacy.target_epsilon is not None:
            target, whom = f"{privacy.target_epsilon:g}", f"one {privacy.unit}"
            return f"By the study's settings training stops at epsilon {target} for {whom}; your site holds it to that."
        if not isinstance(study.method, LocalWork) or privacy.on != ("classifier",):
            return "The study sets no target_epsilon, and what it will spend is not known before."
        assert isinstance(study.data, AtSites)
        images = count_training_images(self._site_file, study.data, self.site)
        batch, method = study.optimizer.at_site(self.site).batch_size, study.method
        steps = method.local_steps or (method.local_epochs or 1) * max(1, images // batch)
        rate, delta = sampling_rate_for(images, batch), self.policy.delta_for(images)
        noise = privacy.noise_in_sum(rate * images)
        spent = compute_epsilon(rate, noise, steps * method.rounds, delta, privacy.accountant)
        whom = f"one of {images} images" if privacy.unit == "image" else "one patient with all images"
        return f"By the study's settings it spends epsilon {spent:.3g} at delta {delta:.2g} for {whom}."

    def _uncovered(self) -> str:
        assert self.study.privacy is not None
        covered = {kind for part in self.study.privacy.on for kind in COVERED[part]} | OF_NO_IMAGE
        kinds = sorted({kind for _, one, _ in operations_of(self.study) for kind in one.releases} - covered)
        open_kinds = [kind for kind in kinds if kind != SCORES]
        words = ["scores of validation and test images" if SCORES in kinds else "", *open_kinds]
        return "; ".join([*filter(None, words), "a patient with several images", "how many images you have"])


def operations_of(study: Study) -> list[tuple[str, Operation, str]]:
    """The operations that a study's coordinator may ask for: name, what each declares, what it is for."""
    found = []
    sums = SiteSums(study.federation, "", Floor(), study.method.SUMMED)
    exchange: list[object] = [KeyExchange()] if _goes_between_sites(study) else []
    exchange += [sums] if study.federation.sum == "secure" else []
    exchange += more_operations(study, lambda _: None)
    for owner in (study.method, *exchange):
        for name in sorted(dir(type(owner))):
            function = getattr(type(owner), name, None)
            if isinstance(declared := getattr(function, "operation", None), Operation):
                leaves = declared._replace(releases=sums.kinds(name, declared.releases))
                found.append((name, leaves, (function.__doc__ or "").split("\n")[0].rstrip(".")))
    return found


def _goes_between_sites(study: Study) -> bool:
    functions = (getattr(type(study.method), name, None) for name in dir(type(study.method)))
    declared = (getattr(function, "operation", None) for function in functions)
    return any(isinstance(one, Operation) and one.partner == "sites" for one in declared)


def _receiver(declared: Operation) -> str:
    if declared.partner == "sites":
        return "to other sites, sealed so that the coordinator cannot read it"
    return "to the coordinator"


def unusual_settings(study: Study) -> list[str]:
    """Every setting that is not what it is in a study that names its method alone."""
    given = study.as_tables()
    try:
        bare = {"data": {"source": "at-sites"}, "sites": given["sites"], "method": {"name": study.method.name}}
        usual = parse_study(bare).as_tables()
    except BadInput:  # a method that needs more than its name: then all settings are said
        usual = {}
    told = []
    for table, settings in sorted(given.items()):
        before = usual.get(table)
        if not isinstance(settings, Mapping):
            told += [f"- {table} = {settings}"] if settings != before and table != "format" else []
            continue
        before = before if isinstance(before, Mapping) else {}
        told += [f"- {table}.{name} = {value}" for name, value in settings.items() if value != before.get(name)]
    return ["Settings that differ from the defaults:", *told]


def new_against(last: JsonObject | None, study: Study) -> list[str]:
    """What is new against the study that was approved last."""
    if last is None:
        return ["No study has been approved at this site before."]
    changes = changed_settings(last, study.as_tables())
    if not changes:
        return ["It has the settings of the study that was approved last."]
    return ["What is new against the study that was approved last:", *(f"- {change}" for change in changes)]


#: of the bytes of numbers: what is left of them on the wire
SHARES = {"exact": 1.0, "delta": 1.0, "fp16": 0.5, "int8": 0.25}


def bytes_a_round(study: Study) -> int | None:
    """Bytes that each site receives in a round, and as many that it sends; None for a method that does not send its
    model back and forth in rounds."""
    released = {kind for _, declared, _ in operations_of(study) for kind in declared.releases}
    if not study.method.traits.gradual or not released & set(AS_LARGE_AS_THE_MODEL):
        return None
    assert isinstance(study.data, AtSites)
    names = study.sites.site_names()
    prepared = PreparedSites(Path(), names, study.data.info(names))
    return int(model_bytes(Assembly(study, prepared, Path()).trainer()) * SHARES[study.engine.wire])


def traffic_in_words(study: Study) -> str:
    """One sentence for the owner of a study."""
    each = bytes_a_round(study)
    if each is None:
        return f"'{study.method.name}' sends other parcels than models: its bytes were not estimated"
    rounds = study.method.rounds
    return (
        f"each site receives and sends about {human_bytes(each)} in each of {rounds} rounds, "
        f"{human_bytes(2 * each * rounds)} in all"
    )
