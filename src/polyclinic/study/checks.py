"""Combinations of settings that cannot work, each with the cure; `ignored` has those that have no effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyclinic.data.file_source import LabelledSource
from polyclinic.data.source import AtSites
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.operation import Operation
from polyclinic.federation.sums.settings import FEWEST, MOST_SITES, Federated
from polyclinic.generators.base import SMALLEST_IMAGE
from polyclinic.methods import METHODS
from polyclinic.methods.shared.generative_replay import GenerativeReplay
from polyclinic.methods.shared.method import Method, OwnModels, ReplayMethod
from polyclinic.models import (
    BACKBONES,
    PUBLIC,
    RANDOM,
    Encoded,
    check_public_weights,
    find,
    is_importable,
    registry_of,
)
from polyclinic.models.encoders import ENCODERS
from polyclinic.privacy.settings import Facts, check_facts
from polyclinic.registry import PLUGGED, notice_once
from polyclinic.settings import no_such_choice
from polyclinic.study.network import (
    backbone_of,
    cuts_of,
    gives_square_map,
    has_batch_norm,
    network_obstacle,
    network_of,
    try_network,
    try_private,
)

if TYPE_CHECKING:
    from polyclinic.study.tables import Study


def check_task(study: Study) -> None:
    """BadInput if the data, the network or the method cannot do the study's task."""
    task, method = study.task.like, study.method
    if task not in study.data.tasks:
        can = ", ".join(study.data.tasks)
        raise BadInput(f"task.name: '{study.data.source}' has no labels for {task}; it is for {can}")
    if task not in method.traits.tasks:
        can = ", ".join(name for name, kind in METHODS.working().items() if task in kind.traits.tasks)
        tasks = ", ".join(method.traits.tasks)
        raise BadInput(f"task.name: method '{method.name}' is for {tasks}, not {task}; choose one of {can}")
    _check_label_range(study, task)
    for setting in ("test_per_class", "test_total_per_class"):
        if task == "regression" and getattr(study.data, setting) is not None:
            raise BadInput(f"data.{setting}: the labels of regression are values and have no classes; leave it out")
    if backbone_of(study).dense != study.task.dense:
        raise BadInput(f"model.backbone: '{study.model.backbone}' cannot do {task}; choose {_fitting(study)}")
    for site, backbone in study.model.backbones.items():
        if not isinstance(method, OwnModels):
            can = ", ".join(name for name, kind in METHODS.working().items() if issubclass(kind, OwnModels))
            raise BadInput(
                f"model.backbones: '{method.name}' needs the same network at every site; choose one of {can}"
            )
        known = is_importable(backbone) or backbone in registry_of(backbone)
        if not known or find(backbone, size=study.data.size).dense != study.task.dense:
            raise BadInput(f"model.backbones: '{backbone}' of site '{site}' cannot do {task}; choose {_fitting(study)}")
    method.check_task(task)


def _check_label_range(study: Study, task: str) -> None:
    """BadInput where values are to be predicted, and nobody says between which bounds; or the other way round."""
    if not isinstance(study.data, LabelledSource):
        return
    bounds = study.data.label_range
    if task == "regression" and bounds is None:
        raise BadInput(
            "data.label_range: missing; regression predicts a value, so give the lowest and the highest one that is "
            "possible, for example label_range = [0, 228]"
        )
    if task == "classification" and bounds is not None:
        raise BadInput(
            "data.label_range: labels are values with it, and classification needs classes; set task.name = "
            "'regression', or take data.label_range out"
        )


def check_model(study: Study) -> None:
    """BadInput if the network lacks what the study wants of it."""
    model, method = study.model, study.method
    for name in dict.fromkeys((model.backbone, *model.backbones.values())):
        if not is_importable(name) and name in BACKBONES and name not in BACKBONES.builtin:
            try_network(name, BACKBONES[name], study.data.size, model.norm)
    cuts = cuts_of(study)
    if not cuts and (model.cut is not None or method.traits.needs_cut):
        why = f"'{method.name}' cuts the network" if method.traits.needs_cut else "the study sets model.cut"
        raise BadInput(
            f"model.backbone: '{model.backbone}' cannot be cut, and {why}; choose one of "
            f"{', '.join(BACKBONES.builtin)}, or an importable nn.Sequential"
        )
    if model.cut is not None and model.cut not in cuts:
        raise BadInput(f"model.cut: {model.backbone} has no cut '{model.cut}'; choose one of {', '.join(cuts)}")
    _check_first_weights(study, cuts)
    method.check_cuts(model.backbone, cuts)
    deployed_weights = model.weights != RANDOM and isinstance(study.data, AtSites)
    may_keep = model.batch_norm == "local" or type(method).local_names is not Method.local_names  # seen without torch
    if deployed_weights and may_keep and method.local_names(network_of(study), model.batch_norm):
        raise BadInput(
            f"model.weights: sites of '{method.name}' keep a part of the network, which at a deployed site would not "
            "begin with the file's weights; choose a method that sends all of it, and model.batch_norm = 'average'"
        )
    if model.batch_norm == "local" and method.traits.batch_norm == "average":
        raise BadInput(f"model.batch_norm: '{method.name}' cannot keep it local; set model.batch_norm = 'average'")
    if method.traits.batch_norm == "local" and not has_batch_norm(study):
        raise BadInput(
            f"method.name: {method.name} keeps batch-norm layers at the sites, and {model.backbone} with "
            f"model.norm = '{model.norm}' has none; choose a backbone with batch norm"
        )


def check_training(study: Study) -> None:
    """BadInput if images, rounds or scores cannot be treated as the study wants."""
    method, optimizer, evaluation, task = study.method, study.optimizer, study.evaluation, study.task
    if "mixup" in optimizer.augment and method.traits.trains not in ("network", "nothing"):
        raise BadInput(f"optimizer.augment: '{method.name}' cannot mix images; take 'mixup' out")
    if optimizer.balanced_batches and task.like != "classification":
        raise BadInput(f"optimizer.balanced_batches: {task.like} has no classes to draw; set it to false")
    metrics = [task.metric, *(name for name in task.more_metrics if name != task.metric)]
    if evaluation.metric is not None and evaluation.metric not in metrics:
        raise BadInput(f"evaluation.metric: {no_such_choice(evaluation.metric, metrics)}")
    if method.patience is not None and evaluation.every == 0:
        raise BadInput(
            "method.patience: nothing is scored on validation images; set evaluation.every = 1, or take "
            "method.patience out"
        )


def _check_private_batches(study: Study) -> None:
    """BadInput if one image would change what others contribute to a private step."""
    if "mixup" in study.optimizer.augment:
        raise BadInput(
            "optimizer.augment: 'mixup' puts two images into one, so that no gradient belongs to one image; take "
            "'mixup' out under differential privacy"
        )
    if study.optimizer.balanced_batches:
        raise BadInput(
            "optimizer.balanced_batches: how often an image is drawn would depend on the labels of others; set it to "
            "false under differential privacy"
        )


def _check_first_weights(study: Study, cuts: tuple[str, ...]) -> None:
    """BadInput if the network cannot begin with the weights that the study or its method wants."""
    model, method = study.model, study.method
    if model.freeze is not None and model.freeze not in cuts:
        raise BadInput(f"model.freeze: {model.backbone} has no cut '{model.freeze}'; choose one of {', '.join(cuts)}")
    if model.norm == "frozen" and model.weights == RANDOM:
        raise BadInput(
            "model.norm: 'frozen' keeps the statistics of the first weights, and random weights have none; set "
            "model.weights to 'public' or a file, or model.norm to 'batch'"
        )
    if method.needs_first_weights() and model.weights == RANDOM:
        raise BadInput(
            f"model.weights: '{method.name}' keeps the first weights up to the cut, as method.front is 'public', and "
            "they are random; set model.weights to 'public' or a file"
        )
    if model.weights == PUBLIC and not issubclass(backbone_of(study), Encoded):
        check_public_weights(model.backbone)
    if method.traits.needs_encoder and not issubclass(backbone_of(study), Encoded):
        can = ", ".join(name for name in ENCODERS.working() if name not in BACKBONES)
        raise BadInput(
            f"model.backbone: '{method.name}' fits a head on an encoder that nobody trains, and '{model.backbone}' is "
            f"trained; choose one of {can}, and on a CPU model.input_size = 128, which is three times as fast as 224"
        )


def check_replay(study: Study) -> None:
    """BadInput if the study replays and cannot."""
    if study.replay is None:
        return
    if not isinstance(study.method, GenerativeReplay):
        can = ", ".join(name for name, method in METHODS.working().items() if issubclass(method, ReplayMethod))
        raise BadInput(f"replay: '{study.method.name}' cannot replay; take the table out, or choose one of {can}")
    if study.replay.codes != "prior" and not study.generator.has_codes:
        raise BadInput(
            f"generator.name: '{study.generator.name}' has no codes to replay; "
            "set replay.codes = 'prior' to replay its samples, or choose vqvae2"
        )
    if study.replay.codes == "prior" and study.task.dense:
        raise BadInput("replay.codes: samples of a prior have no masks; choose final-encoder for segmentation")
    if study.in_latents:
        _check_latents(study)


def _check_latents(study: Study) -> None:
    """BadInput if there are no latents that a generator could learn, or no batch could take them."""
    model, said = study.model, "replay.space = 'latents'"
    if model.freeze is None or model.weights == RANDOM:
        raise BadInput(
            f"model.freeze: {said} replays what frozen layers with public weights give; set model.freeze to a cut and "
            "model.weights to 'public' or a file"
        )
    if model.cut not in (None, model.freeze):
        raise BadInput(f"model.cut: {said} cuts after model.freeze, '{model.freeze}'; leave model.cut out")
    if study.optimizer.augment:
        raise BadInput(f"optimizer.augment: {said} has no images to change; set optimizer.augment = []")
    if not study.method.traits.takes_frozen_features or not study.generator.has_codes:
        raise BadInput(
            f"replay.space: '{study.method.name}' with '{study.generator.name}' cannot; choose cwt-replay "
            "or fedavg-replay, and vqvae2"
        )
    if not gives_square_map(study, model.freeze):
        raise BadInput(f"model.freeze: '{model.freeze}' gives no square map for an image; choose an earlier cut")


def check_tuning(study: Study) -> None:
    """BadInput if the study wants a generator trained in phases that cannot be, or that nobody trains."""
    if (study.method.needs_generator() or study.replay) and study.data.size < SMALLEST_IMAGE:
        raise BadInput(f"data.size: generators need images of {SMALLEST_IMAGE} px or more, not {study.data.size}")
    if study.tuning is None or not study.tuning.on:
        return
    if not study.method.tunes_generator():
        raise BadInput(f"tuning: '{study.method.name}' trains no generator that way; take the table out")
    if not study.generator.tunable:
        raise BadInput(
            f"tuning: '{study.generator.name}' is not trained step by step; set tuning.on = false, or choose a GAN"
        )
    _notice_steps(study)


def _notice_steps(study: Study) -> None:
    """Say that the generator's own number of steps, where somebody set it, is not the one that counts."""
    assert study.tuning is not None, "asked of studies with [tuning] only"
    own, most = getattr(study.generator, "steps", None), study.tuning.most_steps
    usual = own is None or own == type(study.generator).model_fields["steps"].default
    if usual or most is None or most == own:
        return
    notice_once(
        f"generator.steps: {own} is not used, as tuning.most_steps = {most} says how long the generator is trained; "
        "take one of the two out, or set tuning.on = false"
    )


def check_generator(study: Study) -> None:
    """BadInput if the study's generator cannot make what the method or replay wants of it."""
    generator, method, task = study.generator, study.method, study.task.like
    if not method.needs_generator() and study.replay is None:
        return
    generator.check_images(study.data.size, task)
    method.check_generator(generator, task)
    samples = method.needs_generator() or (study.replay is not None and study.replay.codes == "prior")
    if samples and (obstacle := generator.sampling_obstacle()):
        raise BadInput(obstacle)


def check_sites(study: Study) -> None:
    """BadInput if a setting does not go with the study's sites; those that only the data know are checked later."""
    names = study.sites.site_names()
    if not names:
        return
    study.method.check_sites(names)
    check_names_of_sites(study, names)


def check_names_of_sites(study: Study, names: Sequence[str]) -> None:
    """BadInput where a setting by site names one that there is not."""
    by_site = {"model.backbones": [*study.model.backbones], "optimizer.batch_sizes": [*study.optimizer.batch_sizes]}
    for setting, sites in by_site.items():
        unknown = [site for site in sites if site not in names]
        if unknown:
            raise BadInput(f"{setting}: there is no site '{unknown[0]}'; the sites are {', '.join(names)}")


#: kinds of parcel that private training can cover; statistics are empty where it does
COVERABLE = {"weights", "gradients", "generator", "synthetic-images", "statistics"}


def check_privacy(study: Study) -> None:
    """BadInput if the study wants differential privacy where it cannot be had."""
    if study.privacy is None:
        if study.method.traits.trains == "private head":
            raise BadInput(f"privacy: '{study.method.name}' trains with noise; add the table [privacy]")
        return
    parts = [*study.method.traits.private_networks]
    if study.replay is not None and study.replay.ratio > 0:
        parts += ["generator", "prior"] if study.replay.codes == "prior" else ["generator"]
    facts = Facts(
        study.method.name,
        parts,
        study.method.privacy_obstacle(),
        network_obstacle(study),
        study.generator.dp_obstacle(),
        uncovered_kinds(study),
        study.evaluation.every > 0 or study.evaluation.final != "none",
        score_obstacle(study),
    )
    check_facts(study.privacy, facts)
    if {"classifier", "encoder"} & set(study.privacy.on):
        _check_private_batches(study)
        try_private(study)


def score_obstacle(study: Study) -> str | None:
    """Why scores that leave cannot be noised: a sentence with the cure, or None."""
    released = operations_of(study.method).items()
    others = [name for name, found in released if "metrics" in found.releases and name != "evaluate"]
    if others:
        return f"privacy.score_noise: '{study.method.name}' releases other scores, too ({others[0]}); leave it out"
    if not study.task.can_be_noised:
        return f"privacy.score_noise: scores of '{study.task.name}' cannot be noised; leave it out"
    if study.privacy is not None and "classifier" not in study.privacy.on:
        return (
            "privacy.score_noise: scores of a model without privacy tell of its training images; name 'classifier' in "
            "privacy.on"
        )
    return None


def uncovered_kinds(study: Study) -> list[str]:
    """Kinds of parcel, computed from real images, that a study's sites release and no private training covers."""
    own = [found for name, found in operations_of(study.method).items() if not hasattr(GenerativeReplay, name)]
    released = {one for found in own if found.partner != "simulator" for one in found.releases}
    replays = study.replay is not None and study.replay.ratio > 0 and study.replay.codes != "prior"
    return sorted((released - COVERABLE) | ({"codes"} if replays else set()))


def _fitting(study: Study) -> str:
    """The backbones that can do the study's task."""
    return ", ".join(name for name, kind in BACKBONES.working().items() if kind.dense == study.task.dense)


def check_poisoning(study: Study) -> None:
    """Attackers are simulated; no hospital is asked to be one."""
    if study.poisoning and isinstance(study.data, AtSites):
        raise BadInput("[poisoning]: attackers are for simulations, and data.source = 'at-sites' is none; leave it out")


def check_sums(study: Study) -> None:
    """BadInput if the study's method, sites or defence do not go with the way its answers are added up."""
    settings = study.federation
    _check_unused(settings)
    _check_label_sets(study)
    if settings.sum == "float":
        return
    if study.engine.wire != "exact":
        raise BadInput(
            f"engine.wire: '{study.engine.wire}' would change the whole numbers of a sum (federation.sum = "
            f"'{settings.sum}'); set engine.wire = 'exact', or federation.sum = 'float'"
        )
    if obstacle := study.method.sum_obstacle():
        raise BadInput(obstacle)
    count = len(study.sites.site_names() or ())
    if count > MOST_SITES:
        raise BadInput(f"federation.sum: whole numbers take up to {MOST_SITES:,} sites; set federation.sum = 'float'")
    if settings.sum == "secure":
        _check_secure(study, count)


def _check_unused(settings: Federated) -> None:
    for name in ("threshold", "liars"):
        if settings.sum != "secure" and getattr(settings, name) != getattr(Federated(), name):
            raise BadInput(f"federation.{name}: is of secure sums; set federation.sum = 'secure', or leave it out")


def _check_label_sets(study: Study) -> None:
    """BadInput where sites know different classes, and the method would make the model unlearn some."""
    if not study.federation.label_sets:
        return
    setting = "federation.label_sets"
    if study.task.like != "classification":
        raise BadInput(f"{setting}: {study.task.like} has no classes; take it out")
    if not study.method.traits.label_sets:
        raise BadInput(
            f"{setting}: with '{study.method.name}' a site that does not know a class makes the common model unlearn "
            "it; choose fedavg, fedprox, gaussian-heads or analytic, or take the classes out of the data"
        )
    if study.privacy is not None or "mixup" in study.optimizer.augment or study.replay is not None:
        raise BadInput(f"{setting}: does not go with [privacy], [replay] or mixup; take one of the two out")


def _check_secure(study: Study, count: int) -> None:
    settings, fraction = study.federation, study.method.fraction
    asked = max(1, round(fraction * count)) if count else 0
    if count and asked < FEWEST:
        raise BadInput(
            f"federation.sum: a secure sum of {asked} sites would show what a single one sent; take {FEWEST} sites or "
            "more in each round, or set federation.sum = 'integer'"
        )
    if asked and settings.liars >= settings.fewest_of(asked):
        raise BadInput(
            f"federation.liars: {settings.liars} of the {settings.fewest_of(asked)} sites that open a sum may not all "
            "lie; take fewer, or a higher federation.threshold"
        )


def check_kinds(study: Study) -> None:
    """BadInput if an operation of the method releases what is no kind of parcel, or a plug-in's kind that the policy
    of simulated sites does not let out. A deployed site has a policy of its own."""
    allowed = None if isinstance(study.data, AtSites) else study.policy.kinds
    released = [(name, kind) for name, found in operations_of(study.method).items() for kind in found.releases]
    for operation, kind in released:
        if kind not in KINDS:
            raise BadInput(
                f"method.name: '{operation}' of '{study.method.name}' releases '{kind}', which is no kind of parcel; "
                "add a class of it to KINDS of a plug-in, or write one that `polyclinic list kinds` names"
            )
        if allowed is not None and kind not in KINDS.builtin and kind not in allowed:
            raise BadInput(
                f"policy.kinds: lacks '{kind}', which '{operation}' of '{study.method.name}' releases; add it there"
            )


def operations_of(method: Method) -> dict[str, Operation]:
    """The operations of a method, by name."""
    found = {name: getattr(getattr(type(method), name, None), "operation", None) for name in dir(type(method))}
    return {name: declared for name, declared in found.items() if isinstance(declared, Operation)}


def check_attacks() -> None:
    """BadInput if an attack of a plug-in names no kind of parcel, or one that does not exist: it would never run."""
    for name, (attack, origin) in PLUGGED["polyclinic.attacks"].items():
        kinds = getattr(attack, "kinds", None)
        if not isinstance(kinds, tuple) or not kinds:
            raise BadInput(f"{origin}: the attack '{name}' lacks kinds, a tuple with the kinds of parcel that it fits")
        for kind in kinds:
            if kind not in KINDS:
                raise BadInput(f"{origin}: kinds of the attack '{name}': {no_such_choice(str(kind), list(KINDS))}")
