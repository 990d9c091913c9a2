"""Settings that a study has and nothing reads, since another setting decides otherwise: a notice for each.

A setting counts as given where it differs from its default: a study with every setting written out
(`polyclinic study new`) says nothing that nobody chose.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from polyclinic.registry import notice_once
from polyclinic.settings import Settings

if TYPE_CHECKING:
    from polyclinic.study.study import Study


class Rule(NamedTuple):
    """Settings that something reads only where `is_read` holds; `why` says what decides, and so what to change."""

    table: str
    settings: tuple[str, ...]
    is_read: "Callable[[Study], bool]"
    why: str


#: settings of a table (separated by blanks), and the one of the same table, with its values, that makes them be read
READ_WITH = (
    ("optimizer", "momentum", "name", ("sgd",)),
    ("optimizer", "decay decay_every", "schedule", ("step",)),
    ("generator", "smoothing saturating", "loss", ("log",)),
    ("replay", "samples", "codes", ("prior",)),
    ("replay", "looks", "codes", ("samples",)),
    ("defence", "keep", "name", ("sparsify",)),
    ("defence", "fraction", "name", ("prune",)),
    ("defence", "bits", "name", ("quantise",)),
    ("engine", "address gpus", "name", ("ray",)),
    ("engine", "silence approval_wait", "name", ("nvflare",)),
    ("engine", "quorum", "on_failure", ("continue",)),
    ("poisoning", "share", "attack", ("label-flip", "backdoor")),
    ("poisoning", "target patch", "attack", ("backdoor",)),
    ("poisoning", "factor", "attack", ("scale", "sign-flip", "noise")),
    ("federation", "bits", "sum", ("integer", "secure")),
    ("method", "liars", "aggregation", ("trimmed-mean", "multi-krum")),
    ("method", "apart", "aggregation", ("clusters",)),
    ("method", "beta2", "server_optimizer", ("adam", "yogi")),
    ("method", "tau", "server_optimizer", ("adam", "yogi", "adagrad")),
    ("method", "exchange_every sent", "schedule", ("local",)),
)
#: settings of a table, the one of the same table that must be above 0 for them, and what 0 means
READ_ABOVE_ZERO = (
    ("optimizer", "decay", "decay_every", "never lowers the rate"),
    ("generator", "decay", "decay_every", "never lowers the rate"),
    (
        "generator",
        "prior_batch_size prior_lr prior_width prior_layers prior_dropout temperature",
        "prior_epochs",
        "trains no prior",
    ),
    ("replay", "codes own made probe samples", "ratio", "replays nothing"),
    ("tuning", "distance scale growth most_tuning_steps", "alpha", "leaves the second phase out"),
    ("engine", "durable", "checkpoint_every", "writes no checkpoint"),
    ("method", "towards central central_lr warm_up frozen", "weight", "leaves the central discriminator out"),
)


def _with(table: str, settings: str, decides: str, reads: tuple[str, ...] | str) -> Rule:
    """A rule of READ_WITH or READ_ABOVE_ZERO; a variant without the setting that decides reads them."""

    def is_read(study: "Study") -> bool:
        own = getattr(study, table)
        if not hasattr(own, decides):
            return True
        return getattr(own, decides) > 0 if isinstance(reads, str) else getattr(own, decides) in reads

    why = f"{table}.{decides} = 0 {reads}"
    if not isinstance(reads, str):
        listed = " and ".join(f"'{value}'" for value in reads)
        why = f"only {table}.{decides} = {listed} {'reads' if len(reads) == 1 else 'read'} it"
    return Rule(table, tuple(settings.split()), is_read, why)


#: the settings that have an effect only with others; every other setting is always read
RULES: tuple[Rule, ...] = (
    *(_with(*row) for row in (*READ_WITH, *READ_ABOVE_ZERO)),
    Rule(
        "generator",
        (),
        lambda study: study.method.needs_generator() or study.replay is not None,
        "the method trains no generator, and there is no [replay]",
    ),
    Rule("tuning", (), lambda study: study.tuning is None or study.tuning.on, "tuning.on = false"),
    Rule(
        "evaluation",
        ("metric",),
        lambda study: (
            study.evaluation.every > 0 and (study.evaluation.select == "best" or study.method.patience is not None)
        ),
        "no round is chosen by a score: evaluation.select = 'last', or evaluation.every = 0",
    ),
    Rule(
        "evaluation",
        ("statistics",),
        lambda study: study.evaluation.final == "test" and (study.privacy is None or study.privacy.score_noise is None),
        "no test image is opened, as evaluation.final is not 'test', or scores have noise (privacy.score_noise)",
    ),
    Rule(
        "method",
        ("encoder_site", "encoder_passes"),
        lambda study: getattr(study.method, "front", "") != "public",
        "method.front = 'public' has an encoder that nobody trains",
    ),
    Rule("data", ("test",), lambda study: study.data.fold is None, "data.fold says which images are for testing"),
    Rule("data", ("validation",), lambda study: study.data.tuning_fold is None, "data.tuning_fold says which they are"),
    Rule(
        "sites",
        ("power",),
        lambda study: getattr(study.sites, "shares", None) is None,
        "sites.shares gives the sizes of the sites",
    ),
)


def notice_other_images(source: str, settings: Sequence[str]) -> None:
    """Say which settings of `[data]` are for images of another kind, files or drawn ones, than the source has."""
    if settings:
        names = ", ".join(f"data.{name}" for name in settings)
        notice_once(f"{names}: not used, as data.source = '{source}' has images of another kind")


def notice_ignored(study: "Study") -> None:
    """Say which settings of the study have no effect, and why, once in a process."""
    for sentence in ignored(study):
        notice_once(sentence)


def ignored(study: "Study") -> Iterator[str]:
    """A sentence for every rule by which settings that somebody gave are not read."""
    for rule in RULES:
        table = getattr(study, rule.table)
        if not isinstance(table, Settings) or rule.is_read(study):
            continue
        names = [f"{rule.table}.{name}" for name in _given(table, rule.settings)]
        if names:
            yield f"{', '.join(names)}: not used, as {rule.why}"


def _given(table: Settings, settings: tuple[str, ...]) -> Iterator[str]:
    """Those of these settings of a table that are not as by default; where none is named, of all but the one that
    chooses."""
    for name, field in type(table).model_fields.items():
        if name in ("name", "on") or (settings and name not in settings):
            continue
        if field.is_required() or getattr(table, name) != field.get_default(call_default_factory=True):
            yield name
