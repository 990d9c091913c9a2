"""Settings that a study has and nothing reads, since another setting decides otherwise: a notice for each.

A setting counts as given where it differs from its default: a study with every setting written out
(`polyclinic study new`) says nothing that nobody chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from polyclinic.registry import notice_once
from polyclinic.settings import Settings

if TYPE_CHECKING:
    from polyclinic.study.tables import Study


class Rule(NamedTuple):
    """Settings that something reads only where `is_read` holds; `why` says what decides, and so what to change."""

    table: str
    settings: tuple[str, ...]
    is_read: Callable[[Study], bool]
    why: str


def _trains_generator(study: Study) -> bool:
    return study.method.needs_generator() or study.replay is not None


def _is(table: str, setting: str, *values: object) -> Callable[[Study], bool]:
    """Whether a setting has one of these values, where the study has that table and its variant that setting."""

    def holds(study: Study) -> bool:
        own = getattr(study, table)
        return own is None or getattr(own, setting, values[0]) in values

    return holds


#: the settings that have an effect only with others; every other setting is always read (tests/study/test_ignored.py)
RULES: tuple[Rule, ...] = (
    Rule("optimizer", ("momentum",), _is("optimizer", "name", "sgd"), "only optimizer.name = 'sgd' has momentum"),
    Rule(
        "optimizer",
        ("decay", "decay_every"),
        _is("optimizer", "schedule", "step"),
        "only optimizer.schedule = 'step' reads it",
    ),
    Rule(
        "optimizer",
        ("decay",),
        lambda study: study.optimizer.decay_every > 0,
        "optimizer.decay_every = 0 never lowers the rate",
    ),
    Rule("generator", (), _trains_generator, "the method trains no generator, and there is no [replay]"),
    Rule(
        "generator",
        ("decay",),
        lambda study: getattr(study.generator, "decay_every", 1) > 0,
        "generator.decay_every = 0 never lowers the rate",
    ),
    Rule(
        "generator",
        ("smoothing", "saturating"),
        _is("generator", "loss", "log"),
        "only generator.loss = 'log' reads it",
    ),
    Rule(
        "generator",
        ("prior_batch_size", "prior_lr", "prior_width", "prior_layers", "prior_dropout", "temperature"),
        lambda study: getattr(study.generator, "prior_epochs", 1) > 0,
        "generator.prior_epochs = 0 trains no prior",
    ),
    Rule(
        "replay",
        ("codes", "own", "made", "probe", "samples"),
        lambda study: study.replay is None or study.replay.ratio > 0,
        "replay.ratio = 0 replays nothing",
    ),
    Rule("replay", ("samples",), _is("replay", "codes", "prior"), "only replay.codes = 'prior' reads it"),
    Rule("tuning", (), lambda study: study.tuning is None or study.tuning.on, "tuning.on = false"),
    Rule(
        "tuning",
        ("distance", "scale", "growth", "most_tuning_steps"),
        lambda study: study.tuning is None or study.tuning.alpha > 0,
        "tuning.alpha = 0 leaves the second phase out",
    ),
    Rule("defence", ("keep",), _is("defence", "name", "sparsify"), "only defence.name = 'sparsify' reads it"),
    Rule("defence", ("fraction",), _is("defence", "name", "prune"), "only defence.name = 'prune' reads it"),
    Rule("defence", ("bits",), _is("defence", "name", "quantise"), "only defence.name = 'quantise' reads it"),
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
    Rule("engine", ("address", "gpus"), _is("engine", "name", "ray"), "only engine.name = 'ray' reads it"),
    Rule(
        "engine",
        ("silence", "approval_wait"),
        _is("engine", "name", "nvflare"),
        "only engine.name = 'nvflare' and deployed sites read it",
    ),
    Rule(
        "engine",
        ("durable",),
        lambda study: study.engine.checkpoint_every > 0,
        "engine.checkpoint_every = 0 writes no checkpoint",
    ),
    Rule(
        "engine",
        ("quorum",),
        _is("engine", "on_failure", "continue"),
        "engine.on_failure = 'stop' ends the run with the first site that fails",
    ),
    Rule(
        "poisoning",
        ("share",),
        _is("poisoning", "attack", "label-flip", "backdoor"),
        "only poisoning.attack = 'label-flip' and 'backdoor' read it",
    ),
    Rule(
        "poisoning",
        ("target", "patch"),
        _is("poisoning", "attack", "backdoor"),
        "only poisoning.attack = 'backdoor' reads it",
    ),
    Rule(
        "poisoning",
        ("factor",),
        _is("poisoning", "attack", "scale", "sign-flip", "noise"),
        "only poisoning.attack = 'scale', 'sign-flip' and 'noise' read it",
    ),
    Rule(
        "federation",
        ("bits",),
        _is("federation", "sum", "integer", "secure"),
        "only federation.sum = 'integer' and 'secure' read it",
    ),
    Rule(
        "method",
        ("liars",),
        _is("method", "aggregation", "trimmed-mean", "multi-krum"),
        "only method.aggregation = 'trimmed-mean' and 'multi-krum' read it",
    ),
    Rule(
        "method",
        ("apart",),
        _is("method", "aggregation", "clusters"),
        "only method.aggregation = 'clusters' reads it",
    ),
    Rule(
        "method",
        ("beta2",),
        _is("method", "server_optimizer", "adam", "yogi"),
        "only method.server_optimizer = 'adam' and 'yogi' read it",
    ),
    Rule(
        "method",
        ("tau",),
        _is("method", "server_optimizer", "adam", "yogi", "adagrad"),
        "method.server_optimizer = 'sgd' is a plain step",
    ),
    Rule(
        "method",
        ("exchange_every", "sent"),
        _is("method", "schedule", "local"),
        "only method.schedule = 'local' reads it",
    ),
    Rule(
        "method",
        ("towards", "central", "central_lr", "warm_up", "frozen"),
        lambda study: getattr(study.method, "weight", 1) > 0,
        "method.weight = 0 leaves the central discriminator out",
    ),
    Rule(
        "method",
        ("encoder_site", "encoder_passes"),
        lambda study: getattr(study.method, "front", "") != "public",
        "method.front = 'public' has an encoder that nobody trains",
    ),
    Rule(
        "data",
        ("test",),
        lambda study: study.data.fold is None,
        "data.fold says which images are for testing",
    ),
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


def notice_ignored(study: Study) -> None:
    """Say which settings of the study have no effect, and why, once in a process."""
    for sentence in ignored(study):
        notice_once(sentence)


def ignored(study: Study) -> Iterator[str]:
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
