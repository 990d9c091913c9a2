"""What may leave a site: combinations of privacy, sums and kinds of parcel that cannot work, each with the cure."""

from typing import TYPE_CHECKING

from polyclinic.data.source import AtSites
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.operation import Operation
from polyclinic.federation.sums.settings import ADD_FINAL_SCORES, ADD_SCORES, FEWEST, MOST_SITES, Federated
from polyclinic.methods.shared.generative_replay import GenerativeReplay
from polyclinic.methods.shared.method import Method
from polyclinic.privacy.settings import Facts, check_facts
from polyclinic.registry import REGISTRIES
from polyclinic.settings import no_such_choice
from polyclinic.study.checks import network_obstacle, try_private

if TYPE_CHECKING:
    from polyclinic.study.study import Study


#: kinds of parcel that private training can cover; statistics are empty where it does
COVERABLE = {"weights", "gradients", "generator", "synthetic-images", "statistics"}


def check_privacy(study: "Study") -> None:
    """BadInput if the study wants differential privacy where it cannot be had."""
    if study.privacy is None:
        if study.method.traits.trains == "private head":
            raise BadInput(f"privacy: '{study.method.name}' trains with noise; add the table [privacy]")
        return
    parts = [*study.method.traits.private_networks]
    if study.replay is not None and study.replay.ratio > 0:
        parts += ["generator", "prior"] if study.replay.codes == "prior" else ["generator"]
    # kinds of parcel, computed from real images, that no private training covers
    own = [found for name, found in operations_of(study.method).items() if not hasattr(GenerativeReplay, name)]
    released = {one for found in own if found.partner != "simulator" for one in found.releases}
    replays = study.replay is not None and study.replay.ratio > 0 and study.replay.codes not in ("prior", "samples")
    facts = Facts(
        study.method.name,
        parts,
        study.method.privacy_obstacle(),
        network_obstacle(study),
        study.generator.dp_obstacle(),
        sorted((released - COVERABLE) | ({"codes"} if replays else set())),
        study.evaluation.every > 0 or study.evaluation.final != "none",
        score_obstacle(study),
    )
    check_facts(study.privacy, facts)
    if {"classifier", "encoder"} & set(study.privacy.on):
        if "mixup" in study.optimizer.augment:
            raise BadInput(
                "optimizer.augment: 'mixup' puts two images into one, so that no gradient belongs to one image; take "
                "'mixup' out under differential privacy"
            )
        if study.optimizer.balanced_batches:
            raise BadInput(
                "optimizer.balanced_batches: how often an image is drawn would depend on the labels of others; set it "
                "to false under differential privacy"
            )
        try_private(study)


def score_obstacle(study: "Study") -> str | None:
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


def check_sums(study: "Study") -> None:
    """BadInput if the study's method, sites or defence do not go with the way its answers are added up."""
    settings = study.federation
    for name in ("threshold", "liars"):
        if settings.sum != "secure" and getattr(settings, name) != getattr(Federated(), name):
            raise BadInput(f"federation.{name}: is of secure sums; set federation.sum = 'secure', or leave it out")
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


def _check_label_sets(study: "Study") -> None:
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


def _check_secure(study: "Study", count: int) -> None:
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


def check_kinds(study: "Study") -> None:
    """BadInput if an operation of the method releases what is no kind of parcel, or a plug-in's kind that the policy
    of simulated sites does not let out. A deployed site has a policy of its own, and is asked to be no attacker."""
    if study.poisoning and isinstance(study.data, AtSites):
        raise BadInput("[poisoning]: attackers are for simulations, and data.source = 'at-sites' is none; leave it out")
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


CHECKS = (check_privacy, check_sums, check_kinds)


def operations_of(method: Method) -> dict[str, Operation]:
    """The operations of a method, by name, but for those in which its scores are added up."""
    found = {name: getattr(getattr(type(method), name, None), "operation", None) for name in dir(type(method))}
    found |= dict.fromkeys((ADD_SCORES, ADD_FINAL_SCORES))
    return {name: declared for name, declared in found.items() if isinstance(declared, Operation)}


def check_attacks() -> None:
    """BadInput if an attack of a plug-in names no kind of parcel, or one that does not exist: it would never run."""
    attacks = REGISTRIES.get("polyclinic.attacks")  # no plug-in has added one where nobody has imported the registry
    for name, (attack, origin) in attacks.added.items() if attacks else ():
        kinds = getattr(attack, "kinds", None)
        if not isinstance(kinds, tuple) or not kinds:
            raise BadInput(f"{origin}: the attack '{name}' lacks kinds, a tuple with the kinds of parcel that it fits")
        for kind in kinds:
            if kind not in KINDS:
                raise BadInput(f"{origin}: kinds of the attack '{name}': {no_such_choice(str(kind), list(KINDS))}")
