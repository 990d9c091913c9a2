"""A study in plain sentences, for the person at a site who approves it: three lines in short, what the site's policy
will refuse, and then what would leave, how often, to whom."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from polyclinic.data.own_images import look_at_training_images, split_in_words
from polyclinic.data.parts import PreparedSites
from polyclinic.data.source import AtSites
from polyclinic.data.volumes.source import OfVolumes
from polyclinic.deployment.approval import TRUSTED_WEIGHTS
from polyclinic.deployment.approval_rules import changed_settings, trusted_tensors
from polyclinic.errors import BadInput
from polyclinic.federation.layers.gate import model_bytes
from polyclinic.federation.layers.sealing import KeyExchange
from polyclinic.federation.ledger.budget import SCORES
from polyclinic.federation.ledger.keys import KitKeys
from polyclinic.federation.ledger.kinds import DANGEROUS, KINDS_IN_WORDS, OF_NO_IMAGE
from polyclinic.federation.operation import Operation
from polyclinic.federation.policy import Policy
from polyclinic.federation.sums.settings import Floor, added_up, floor_of
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
from polyclinic.study.policy_check import Counts, Refusal, refused_by

ASK_FOR_FILE = f"Ask where the file is from, and put it into {TRUSTED_WEIGHTS} of your kit if you trust it."
#: kinds of parcel that are trained with differential privacy where `privacy.on` names the network
COVERED = {
    "classifier": ("weights", "gradients"),
    "encoder": (),
    "primary": (),
    "generator": ("generator", "synthetic-images"),
    "prior": ("generator", "synthetic-images"),
}
#: what operations are for whose methods are so short that they do not say it
PURPOSES = {
    "train": "Train the network on the site's training images",
    "count": "Count the site's training images",
    "give_sums": "Add up what a public network makes of the site's training images",
    "give_latents": "Send what the first layers of the network make of each training image",
    "give_gradients": "The direction in which the site's training images would change the network",
}
#: kinds whose size is that of the model
AS_LARGE_AS_THE_MODEL = ("weights", "gradients", "masked")
#: what attacks of ours have got out of such parcels, the worst first; README.md, docs/audit.md and lab/pages have how
REBUILT = {
    ("real-images", "labels", "masks"): "nothing has to be rebuilt of what leaves as it is",
    ("latents", "activations"): "32 of 32 images were rebuilt from latents; a decoder that has learnt from other "
    "people's images told 94 to 100 of 100 images apart by them",
    ("codes",): "all images, by whoever has the decoder of the codes",
    ("gradients",): "79 of 100 images were rebuilt, each from the gradient of this one image; of many images at once, "
    "fewer",
    ("weights",): "79 of 100 images were rebuilt where one step on one image was behind a model; the more images and "
    "steps are behind it, the fewer. Of a model one may also guess who was among its training images",
    ("generator", "synthetic-images"): "no image was rebuilt by itself, but a generator of few images may repeat them, "
    "and one may guess who was among its training images",
    ("statistics",): "where a site had fewer images than the sums have numbers, each image was recognised (AUC 1.000); "
    "with more images, fewer",
    ("masked",): "nothing of a single site; what comes out is the sum of all of them",
    ("metrics",): "nothing in coarse steps; scores of few images told who was among them",
}


@dataclass(frozen=True)
class Asked:
    """A study as one site sees it; the plug-ins of the site must be loaded."""

    study: Study
    site: str
    kit: Path
    policy: Policy

    def sentences(self, last: JsonObject | None) -> list[str]:
        """Everything a person should know before approving; `last` is the study that was approved last."""
        rounds = "1 round" if self.study.method.rounds == 1 else f"{self.study.method.rounds} rounds"
        new = ["No study has been approved at this site before."]
        if last is not None:
            changes = [f"- {change}" for change in changed_settings(last, self.study.as_tables())]
            new = ["It has the settings of the study that was approved last."]
            new = ["What is new against the study that was approved last:", *changes] if changes else new
        return [
            *self.about(),
            "",
            "What the coordinator may ask of this site:",
            *(f"- {line}" for line in self.what_leaves()),
            "It may have any of this sent to another site instead, sealed: then only that site can read it.",
            "",
            f"The study has {rounds}. The coordinator may ask for an operation more "
            "than once in a round; scores leave once a round, and once more at the end.",
            self.bytes(),
            self.scores(),
            *self.privacy(),
            "",
            *unusual_settings(self.study),
            "",
            *new,
        ]

    @cached_property
    def operations(self) -> list[tuple[str, Operation, str]]:
        return operations_of(self.study)

    @property
    def kinds(self) -> set[str]:
        """What may leave, but for what exists in simulation only."""
        needless = "labels" if self.study.task.dense else "masks"
        found = {kind for _, one, _ in self.operations if one.partner != "simulator" for kind in one.releases}
        return found - {needless}

    @cached_property
    def counts(self) -> Counts | None:
        """The site's training images, counted here; nobody else is told."""
        data = self.study.data
        if not isinstance(data, AtSites):
            return None
        return look_at_training_images(self._site_file, data, self.site, lambda part: Counts.of(part, data.classes))

    def in_short(self) -> list[str]:
        """Three lines: what leaves, what attacks have got out of such parcels, what bounds it."""
        kinds, study, policy = self.kinds - OF_NO_IMAGE, self.study, self.policy
        told = [f"{KINDS_IN_WORDS[k]}{' (DANGEROUS)' * (k in DANGEROUS)}" for k in sum(REBUILT, ()) if k in kinds]
        told += sorted(kinds - KINDS_IN_WORDS.keys())
        first = {words: next(k for k in some if k in kinds) for some, words in REBUILT.items() if kinds & {*some}}
        got = [f"from {KINDS_IN_WORDS[kind]}: {words}" for words, kind in first.items()]
        allowed = ", ".join(kind for kind in policy.kinds if kind not in (*OF_NO_IMAGE, "masked"))
        cohort = f", of at least {policy.min_cohort} patients together" if policy.min_cohort > 1 else ""
        bounds = [f"your policy, which lets out {allowed}{cohort}"]
        if study.federation.sum == "secure":
            least = floor_of(policy, len(self._pinned)).min_sites
            bounds.append(f"a secure sum, of {least} sites at least, hides your numbers among theirs")
        target = study.privacy.target_epsilon if study.privacy else None
        limit = f" of at most {target:g}" if target is not None else ""
        bounds.append(f"an epsilon{limit} (differential privacy)" if study.privacy else "no differential privacy")
        return [
            f"What leaves: {'; '.join(told) or 'nothing'}.",
            f"What attacks have got out of such parcels: {'; '.join(got[:2]) or 'nothing was tried'}.",
            f"What bounds it: {'; '.join(bounds)}.",
        ]

    def refused(self) -> list[Refusal]:
        """What the site's policy will refuse, by all that can be foreseen here; the coordinator is not told."""
        one_round = not self.study.method.traits.gradual
        try:
            own = self.counts if one_round else None
        except BadInput as error:
            return [Refusal(f"its images cannot be read here: {error}", "mend local/site.toml", by_images=True)]
        return refused_by(self.study, self.policy, own, len(self._pinned))

    @cached_property
    def _pinned(self) -> tuple[str, ...]:
        keys = KitKeys(self.kit / "local")
        return keys.pinned() if keys.path.is_file() else ()

    def about(self) -> list[str]:
        study, data = self.study, self.study.data
        dataset = data.dataset if isinstance(data, AtSites) else "no dataset of yours"
        others = [name for name in study.sites.site_names() if name != self.site]
        network = f"{study.model.backbone} for {study.task.name}"
        told = [
            f"Method {study.method.name} ({study.method.summary}).",
            f"It trains the network {network} on your images '{dataset}'.",
            f"The other sites are {', '.join(others) or 'none'}.",
        ]
        if isinstance(data, AtSites):
            try:
                told.append(split_in_words(self._site_file, data))
            except BadInput as error:
                told.append(f"It cannot run at this site as it is: {error}.")
        if isinstance(data, OfVolumes):
            told.append(prepared_in_words(data))
        told += [*self.first_weights(), *self.second_model()]
        if isinstance(study.method, Analytic) and study.method.worth:
            told.append("It also wants sums of products over your validation images: what each site adds to the model.")
        return told

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
        unknown = "which your site does not have: what comes first is taken as it is"
        return [f"{name} with the SHA-256 {model.weights_sha256}, {unknown}. {ASK_FOR_FILE}"]

    def second_model(self) -> list[str]:
        """The model that the first one is compared with, if there is one."""
        method = self.study.method
        if not isinstance(method, EvaluateOnly) or not (method.against or method.against_digest):
            return []
        name = f"It compares them, on your test images, with the model in the file '{Path(method.against or '').name}'"
        known = trusted_tensors(self.kit / TRUSTED_WEIGHTS, method.against_digest)
        if known is not None:
            return [f"{name}: your site has it as {known.name}."]
        return [f"{name}, which your site does not have. {ASK_FOR_FILE}"]

    @property
    def _site_file(self) -> Path:
        return self.kit / "local" / "site.toml"

    def what_leaves(self) -> Iterator[str]:
        """What may leave by each operation, and to whom."""
        for name, declared, purpose in self.operations:
            about = f"{purpose} (step '{name}')" if purpose else f"Step '{name}'"
            if declared.partner == "simulator":
                yield f"{about}: exists in simulation only, and this site refuses it."
            elif not declared.releases:
                yield f"{about}: nothing leaves."
            else:
                sealed = "to other sites, sealed so that the coordinator cannot read it"
                to = sealed if declared.partner == "sites" else "to the coordinator"
                released = [kind for kind in declared.releases if kind in self.kinds]
                kept = ", ".join(kind for kind in released if kind not in self.policy.kinds)
                refused = f" Your policy keeps {kept} back, so this fails where it is needed." if kept else ""
                leaves = ", ".join(KINDS_IN_WORDS.get(kind, kind) for kind in released)
                yield f"{about}: {leaves}, {to}.{refused}"

    def bytes(self) -> str:
        """An estimate for what has the size of the model; nothing is said of kinds whose size hangs on images."""
        limit = self.policy.max_bytes
        most = f"Your policy stops everything after {limit:,} bytes." if limit is not None else ""
        if not self.kinds & set(AS_LARGE_AS_THE_MODEL):
            return f"How many bytes leave is not known before. {most}".strip()
        one = self.model_bytes()
        return (
            f"The model has about {one:,} bytes: {one * self.study.method.rounds:,} bytes if it leaves once a round. "
            f"Other kinds come on top. {most}".strip()
        )

    def model_bytes(self) -> int:
        names = self.study.sites.site_names()
        assert isinstance(self.study.data, AtSites)
        parts = PreparedSites(self.kit, names, self.study.data.info(names))
        assembly = Assembly(self.study, parts, self.kit / "runs", self.policy)
        backbone = self.study.model.backbones.get(self.site)
        tensors = assembly.build_model(backbone).state_dict().values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def scores(self) -> str:
        if not any(SCORES in declared.releases for _, declared, _ in self.operations):
            return "No scores on your images leave."
        coarse = "rounded, without small counts" if self.policy.scores == "coarse" else "exactly as they are"
        return f"Scores of models on your validation and test images leave, {coarse} (scores in policy.toml)."

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
        assert self.counts is not None
        images = self.counts.images
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
        kinds = sorted({kind for _, one, _ in self.operations for kind in one.releases} - covered)
        open_kinds = [kind for kind in kinds if kind != SCORES]
        words = ["scores of validation and test images" if SCORES in kinds else "", *open_kinds]
        return "; ".join([*filter(None, words), "a patient with several images", "how many images you have"])


def operations_of(study: Study) -> list[tuple[str, Operation, str]]:
    """The operations that a study's coordinator may ask for: name, what each declares, what it is for."""
    found = []
    sums = SiteSums(study.federation, "", Floor(), added_up(study))
    functions = (getattr(type(study.method), name, None) for name in dir(type(study.method)))
    declared_by = (getattr(function, "operation", None) for function in functions)
    between = any(isinstance(one, Operation) and one.partner == "sites" for one in declared_by)
    exchange: list[object] = [KeyExchange()] if between else []
    exchange += [sums] if study.federation.sum == "secure" else []
    exchange += more_operations(study, lambda _: None)
    for owner in (study.method, *exchange):
        for name in sorted(dir(type(owner))):
            function = getattr(type(owner), name, None)
            declared = getattr(function, "operation", None)
            if isinstance(declared, Operation) and name not in sums.other_scores:
                leaves = declared._replace(releases=sums.kinds(name, declared.releases))
                words = " ".join((function.__doc__ or PURPOSES.get(name, "")).split()).split(": `")[0]
                purpose = words.split(". ")[0].rstrip(".")
                found.append((name, leaves, purpose))
    return found


def prepared_in_words(data: OfVolumes) -> str:
    """How a study has a site prepare its volumes."""
    known = data.preparation
    mm = " x ".join(f"{one:g}" for one in known.spacing) + " mm" if known.spacing else "their own spacing"
    return (
        f"It wants volumes of the channels {', '.join(data.channels)} with masks of {', '.join(data.structures)}; your "
        f"site resamples them to {mm} (intensities: {known.normalise}), and trains on patches of "
        f"{' x '.join(map(str, data.size))} voxels."
    )


def unusual_settings(study: Study) -> list[str]:
    """Every setting that is not what it is in a study that names its method alone."""
    given = study.as_tables()
    bare: dict[str, Any] = {"data": {"source": given["data"]["source"]}, "sites": given["sites"]}
    bare["method"] = {"name": study.method.name}
    usual = {}  # of a method that needs more than its name and its network all settings are said
    for more in ({"model": {"backbone": study.model.backbone}}, {}):
        with contextlib.suppress(BadInput):
            usual = parse_study(bare | more).as_tables()
    told = []
    for table, settings in sorted(given.items()):
        before = usual.get(table)
        if not isinstance(settings, Mapping):
            told += [f"- {table} = {settings}"] if settings != before and table != "format" else []
            continue
        before = before if isinstance(before, Mapping) else {}
        told += [f"- {table}.{name} = {value}" for name, value in settings.items() if value != before.get(name)]
    return ["Settings that differ from the defaults:", *told]


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
