"""`privacy.cover = "all"`: a study that would release anything uncovered is refused, and names the cure."""

import pytest

from polyclinic.errors import BadInput
from polyclinic.federation.ledger.ledger import verify
from polyclinic.runner.run.run import run

NO_SCORES = {"evaluation.every": 0, "evaluation.final": "none", "evaluation.select": "last"}
ALL = {"privacy.cover": "all", "privacy.on": ["classifier"], "privacy.noise_multiplier": 1.0}
REPLAY = {"generator.name": "vqvae2", "generator.codebook": "gradient"}


@pytest.mark.parametrize(
    ("method", "settings", "cure"),
    [
        ("fedavg", {**ALL}, "set evaluation.every = 0 and evaluation.final = 'none'"),
        ("fedavg", {**ALL, "evaluation.every": 0}, "evaluation.final = 'none'"),
        ("fedavg", {**ALL, "evaluation.final": "none"}, "set evaluation.every = 0"),
        (
            "fedavg-replay",
            {**ALL, **REPLAY, **NO_SCORES, "privacy.on": ["generator"], "replay.codes": "final-encoder"},
            "name classifier in privacy.on",
        ),
        (
            "fedavg-replay",
            {**ALL, **REPLAY, **NO_SCORES, "privacy.on": ["generator", "classifier"], "replay.codes": "final-encoder"},
            "set replay.codes = 'prior'",
        ),
        ("fedreplay", {**ALL, **NO_SCORES, "privacy.on": ["encoder", "primary"]}, "releases labels, latents"),
        (
            "felicia",
            {**ALL, **NO_SCORES, "generator.name": "gan", "privacy.on": ["generator"]},
            "'felicia' releases metrics of real images, which nothing covers",
        ),
    ],
)
def test_what_would_leave_uncovered_is_named_with_the_cure(tiny, method, settings, cure):
    with pytest.raises(BadInput) as refused:
        tiny(method, settings)
    assert cure in str(refused.value)
    assert str(refused.value).startswith("privacy.cover: ")


@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
def test_a_study_in_which_all_is_covered_releases_no_score(tiny, tmp_path, method):
    study = tiny(method, {**ALL, **NO_SCORES, "sites.count": 2}, rounds=2)
    result = run(study, tmp_path / "run")
    lines = [line for file in (tmp_path / "run" / "ledger").iterdir() for line in verify(file)]
    assert lines
    assert {line["kind"] for line in lines} <= {"weights", "gradients", "statistics"}
    assert result.values["privacy"]["covers"] == ["everything released"]
    assert result.values["metrics"]["test"] == {}
