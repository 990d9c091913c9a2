"""Measures, rules and inversions of claims."""

import json
from pathlib import Path

import pytest
import torch
from scipy import stats

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study
from polyclinic.study.study import parse_sets
from polyclinic_lab import inversions
from polyclinic_lab.claim import CLAIMS
from polyclinic_lab.judge import plan
from polyclinic_lab.measures import Row, audited, carried_each_round, forgetting, measure, projected
from polyclinic_lab.rules import interval, mixed_interval, parse_rule, parse_sentence


@pytest.fixture
def audited_run(tmp_path: Path) -> Path:
    findings = [{"attack": "learned-decoder", "evidence": {"picked": share}} for share in (0.5, 0.7)]
    parcels = [{"kind": "latents", "findings": findings}, {"kind": "weights", "findings": []}]
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "site-1.jsonl").write_text('{"kind": "latents"}\n')
    (tmp_path / "audit.json").write_text(json.dumps({"complete": True, "budget": "quick", "parcels": parcels}))
    return tmp_path


def test_a_number_of_an_audit_is_the_mean_of_its_findings(audited_run: Path) -> None:
    assert audited(audited_run, "latents", "picked", "decoder") == {"picked": pytest.approx(0.6)}
    assert audited(audited_run, "latents", "picked", "inversion") == {}


def test_a_number_that_no_finding_has_is_an_error(audited_run: Path) -> None:
    with pytest.raises(WorkFailed, match="no number 'identified'"):
        audited(audited_run, "latents", "identified", "decoder")


def test_forgetting_is_measured_at_sites_that_have_trained(tmp_path: Path) -> None:
    """Sites trained in the order b, a, c; what b's model gets right at a, where it has not been yet, does not count."""
    table = {
        "a": {"b": 0.0, "a": 0.9, "c": 0.7},
        "b": {"b": 0.8, "a": 0.1, "c": 0.5},
        "c": {"b": 0.0, "a": 0.0, "c": 1.0},
    }
    (tmp_path / "forgetting.json").write_text(json.dumps({"better": "higher", "rounds": {"1": table}}))
    found = forgetting(tmp_path)
    assert found == pytest.approx({"just trained": 0.85, "after the last site": 0.6, "lost": 0.25})
    (tmp_path / "forgetting.json").write_text(json.dumps({"better": "lower", "rounds": {"1": table}}))
    assert forgetting(tmp_path)["lost"] == pytest.approx(-0.25)


def test_generators_of_feder_are_projected_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyclinic_lab.generators.PROJECTED", 4)
    tables = {
        "data": {"source": "chest-phantom", "size": 28, "samples": 60},
        "sites": {"count": 2, "partition": "iid"},
        "engine": {"workers": 1},
        "model": {"backbone": "small-cnn"},
        "method": {"name": "feder", "rounds": 1, "buffer": 8},
        "generator": {"name": "dcgan", "steps": 2, "width": 8, "latent": 8},
        "tuning": {"distance": "pixels", "most_steps": 2, "most_tuning_steps": 2, "measured": 20},
    }
    plain, private = (
        run(parse_study({**tables, "tuning": {**tables["tuning"], "alpha": alpha}}), tmp_path / f"{alpha}").folder
        for alpha in (0.0, 1.0)
    )
    found = projected({"without": [plain], "with": [private]}, "quick")
    for label in ("without", "with"):
        ((distances,),) = [found[label, "distance"]]
        assert len(distances) == 8  # four images at each of two sites
        assert all(0 < value < 1 for value in distances)  # mean squared differences of pixels in [0, 1]
    assert found["without", "distance"] != found["with", "distance"]
    assert (plain / "projected.png").exists()
    assert projected({"without": [plain]}, "quick") == {}


def test_a_claim_s_measures_make_a_row_for_each_arm_and_metric(tmp_path: Path) -> None:
    for name, mae in (("a", 3.0), ("b", 5.0)):
        (tmp_path / name).mkdir()
        told = {"metrics": {"test": {"mae": mae}}, "communication": {"total_bytes": 2_000_000}}
        (tmp_path / name / "result.json").write_text(json.dumps(told))
    found = measure(["test mae", "carried"], {"one": [tmp_path / "a", tmp_path / "b"]}, "quick")
    assert found == [Row("one", "mae", (3.0, 5.0)), Row("one", "MB", (2.0, 2.0))]
    assert (found[0].mean, found[0].std) == (4.0, pytest.approx(2**0.5))


def test_models_of_all_arms_are_compared_seed_by_seed(tmp_path: Path) -> None:
    folders: dict[str, list[Path]] = {"a": [], "b": []}
    for label, digests in (("a", "xy"), ("b", "xz")):
        for seed, digest in enumerate(digests):
            run = tmp_path / f"{label}{seed}"
            run.mkdir()
            (run / "result.json").write_text(json.dumps({"weights_sha256": digest}))
            folders[label].append(run)
    assert measure(["one_digest"], folders, "quick") == [Row("all arms", "different models", (1.0, 2.0))]


def test_epsilon_falls_with_noise_and_rises_with_epochs() -> None:
    plain, noisy = (
        {(row.label, row.metric): row.mean for row in measure([words], {}, "quick")}
        for words in ("epsilons", "epsilons noise=1.2")
    )
    assert all(noisy[key] < plain[key] for key in plain)
    assert plain["1144 images", "epsilon after 50 epochs"] < plain["1144 images", "epsilon after 300 epochs"]


def test_bytes_of_a_site_and_round_are_those_that_sites_send(tmp_path: Path) -> None:
    told = {"total_bytes": 90, "sent_bytes": 48_000_000, "per_site": {"a": 1, "b": 2}}
    (tmp_path / "result.json").write_text(json.dumps({"communication": told, "rounds": 4}))
    assert carried_each_round(tmp_path) == {"MB a site and round": 6.0}


@pytest.mark.slow  # two processes that import torch
def test_a_killed_run_is_resumed_and_compared(tmp_path: Path) -> None:
    tables = {
        "data": {"source": "hand-phantom", "size": 28, "samples": 60},
        "task": {"name": "regression"},
        "sites": {"count": 2, "partition": "iid"},
        "engine": {"workers": 1},
        "method": {"name": "fedavg", "rounds": 40},
    }
    done = run(parse_study(tables), tmp_path / "fedavg-seed0")
    assert measure(["same_after_kill"], {"fedavg": [done.folder]}, "quick") == [
        Row("fedavg", "different models", (1.0,))
    ]
    assert (tmp_path / "fedavg-seed0-killed" / "result.json").exists()


CLEAR = {("a", "mae"): (1.0, 1.1, 0.9), ("b", "mae"): (2.0, 2.1, 1.9)}
LOWER = "mae of a is lower than that of b"


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (LOWER, "yes"),
        ("mae of b is lower than that of a", "no"),
        ("mae of a is lower than that of b by at least 0.5", "yes"),
        ("mae of a is lower than that of b by at least 1.5", "no"),
        ("mae of b is lower than that of a plus 1.5", "yes"),
        ("mae of b is lower than that of a plus 0.5", "no"),
        ("mae of b is lower than 3 times that of a", "yes"),
        ("mae of b is lower than 1.5 times that of a", "no"),
        ("mae of a is at most 1.5", "yes"),
        ("mae of a is at most 0.5", "no"),
        ("mae of a is at most 1", "undecided"),
        ("mae of a is at least 0.5", "yes"),
        ("mae of a is at least 1.5", "no"),
        ("mae of a is lower than that of c", "undecided"),  # which has no runs
    ],
)
def test_a_sentence_is_judged_by_the_interval_of_its_differences(words: str, word: str) -> None:
    assert parse_sentence(words).judge(CLEAR).word == word


def test_the_interval_is_student_s() -> None:
    """Differences -1.0, -1.2, -0.8 of three seeds: mean -1, deviation 0.2, t = 4.303 for two degrees of freedom."""
    table = {("a", "x"): (1.0, 1.0, 1.0), ("b", "x"): (2.0, 2.2, 1.8)}
    half = 4.302653 * 0.2 / 3**0.5
    assert interval([-1.0, -1.2, -0.8]) == pytest.approx((-1 - half, -1 + half), rel=1e-5)
    why = parse_sentence("x of a is lower than that of b").judge(table).why
    assert why.endswith("difference -1, 95 % interval -1.5 to -0.503")


def test_scatter_and_one_seed_do_not_decide() -> None:
    sentence = parse_sentence("auc of a is lower than that of b")
    assert sentence.judge({("a", "auc"): (0.7, 0.9, 0.8), ("b", "auc"): (0.8, 0.7, 0.9)}).word == "undecided"
    assert sentence.judge({("a", "auc"): (0.7,), ("b", "auc"): (0.9,)}).word == "undecided"
    assert sentence.judge({("a", "auc"): (0.7, 0.7, 0.7), ("b", "auc"): (0.9, 0.9)}).word == "undecided"


def test_one_pair_of_an_exact_metric_decides() -> None:
    table = {("a", "MB"): [3.0], ("b", "MB"): [2.0]}
    for factor, word in (("1.6", "yes"), ("1.4", "no")):
        sentence = parse_sentence(f"MB of a is lower than {factor} times that of b", exact=["MB"])
        assert sentence.judge(table).word == word


def test_one_value_of_an_exact_metric_decides() -> None:
    table = {("all", "models"): (1.0,)}
    for words, word in (("at most 1", "yes"), ("at most 0", "no"), ("at least 2", "no"), ("at least 1", "yes")):
        sentence = parse_sentence(f"models of all is {words}", exact=["models"])
        assert sentence.judge(table).word == word
        assert sentence.judge({}).word == "undecided"
        assert parse_sentence(sentence.words).judge(table).word == "undecided"


def test_one_sentence_that_does_not_hold_decides_for_all() -> None:
    wrong, unknown = "mae of b is lower than that of a", "mae of a is lower than that of c"
    assert parse_rule([LOWER, wrong, unknown]).judge(CLEAR).word == "no"
    assert parse_rule([LOWER, unknown]).judge(CLEAR).word == "undecided"
    assert parse_rule([LOWER]).judge(CLEAR).word == "yes"
    assert parse_rule([LOWER, wrong]).words == f"{LOWER}; and {wrong}"


def test_a_rule_with_a_condition_says_nothing_without_it() -> None:
    assert parse_rule([LOWER], "mae of b is at most 3").judge(CLEAR) == parse_rule([LOWER]).judge(CLEAR)
    for condition in ("mae of b is at most 1", "mae of b is at most 2", "mae of c is at most 1"):  # no, open, no data
        found = parse_rule([LOWER], condition).judge(CLEAR)
        assert found.word == "undecided"
        assert "condition does not hold" in found.why


def test_metrics_and_arms_may_have_commas_numbers_and_of() -> None:
    found = parse_sentence("accuracy of horse, augmented of local GAN is lower than that of fedavg, 6 sites plus 0.03")
    assert (found.metric, found.label) == ("accuracy of horse, augmented", "local GAN")
    assert (found.other, found.limit) == ("fedavg, 6 sites", 0.03)


def test_another_sentence_is_refused() -> None:
    with pytest.raises(BadInput, match="is lower than that of ARM"):
        parse_sentence("mae of a beats that of b")


def test_images_in_seeds_are_blocks() -> None:
    """Two seeds of three images, differences 1, 2, 3 and 2, 3, 4.

    Means 2 and 3: variance .5 between them, of which images explain 1/3: 1/6 is left. So the variance of the mean is
    1/12 (one degree of freedom) + 1/6 (four): 1/4, with (1/4)² / (1/144 + 1/144) = 4.5 degrees.
    """
    low, high = mixed_interval([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    half = stats.t.ppf(0.975, 4.5) * 0.5
    assert (low, high) == pytest.approx((2.5 - half, 2.5 + half))
    alone = mixed_interval([[1.0, 2.0, 3.0]])
    assert alone == pytest.approx(interval([1.0, 2.0, 3.0]))
    table = {("a", "x"): [[1.0, 2.0], [1.0, 2.0]], ("b", "x"): [[3.0, 4.1], [2.9, 4.0]]}
    assert parse_sentence("x of a is lower than that of b").judge(table).word == "yes"
    assert parse_sentence("x of b is lower than that of a").judge(table).word == "no"
    assert parse_sentence("x of b is at least 2.5").judge({("b", "x"): [[3.0, 3.1], [2.9, 3.0]]}).word == "yes"


def test_an_open_sentence_says_how_many_seeds_would_decide() -> None:
    """Differences -1, -2, 0: mean -1, deviation 1. t of n - 1 degrees over the root of n is below 1 first at n = 7."""
    table = {("a", "x"): (1.0, 1.0, 1.0), ("b", "x"): (2.0, 3.0, 1.0)}
    assert stats.t.ppf(0.975, 5) / 6**0.5 > 1 > stats.t.ppf(0.975, 6) / 7**0.5
    why = parse_sentence("x of a is lower than that of b").judge(table).why
    assert why.endswith("about 7 seeds would decide")
    rule = parse_rule(["x of a is lower than that of b"], unit="images")
    assert rule.judge(table).why.endswith("about 7 images would decide")
    table = {("a", "x"): (1.0, 3.0), ("b", "x"): (2.0, 2.0)}
    assert parse_sentence("x of a is lower than that of b").judge(table).why.endswith("more than 999 seeds are needed")


@pytest.fixture
def short(monkeypatch):
    """Two images of noise, and searches of two steps."""
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for name in ("sent", "_attacked"):
        getattr(inversions, name).cache_clear()
    monkeypatch.setattr(inversions, "drawn", lambda data, count: (images, torch.tensor([3, 99])))
    whole = inversions.settings_of
    steps = {"iterations": 2, "trajectory": (1, 2)}
    monkeypatch.setattr(inversions, "settings_of", lambda *given: whole(*given).model_copy(update=steps))
    monkeypatch.setitem(inversions.IMAGES, "lenet", {"quick": 2})


def test_networks_are_the_papers():
    networks = inversions.LeNet(3, 100, 32), inversions.UnstridedResNet18(3, 100, 32)
    assert [sum(one.numel() for one in network.parameters()) for network in networks] == [85_036, 14_445_732]


def test_a_label_says_the_attack():
    fixed = inversions.settings_of("TG, 50", "lenet")
    assert (fixed.start, fixed.variance, fixed.kernel, fixed.scaled) == (
        "transformed-gaussian",
        50,
        "whole-gradient",
        False,
    )
    other = inversions.settings_of("Unif, AG, lr 1", "lenet")
    assert (other.start, other.distance, other.lr, other.returns) == ("uniform", "adaptive-gaussian", 1.0, "last")
    assert inversions.settings_of("TG, Eucl", "resnet").iterations == 5000
    with pytest.raises(BadInput, match="use --scale full"):
        inversions.inverted({"TG, Eucl": []}, "quick", "noise", "resnet")


def test_an_image_fails_by_its_error_after_the_first_step(short):
    found = inversions.inverted({"TG, Eucl": [], "another image": []}, "quick", "noise", "lenet", "curves")
    first, last = found["TG, Eucl", "mse after 1 steps"], found["TG, Eucl", "mse after 2 steps"]
    for place, failed in enumerate(found["TG, Eucl", "failed"]):
        assert (first[place] is None) == bool(failed)  # figures are those of images that came back
        assert failed or last[place] < first[place]
    assert found["another image", "mse"][0] == found["another image", "mse"][1]  # of two, each is the other's


def test_pairs_of_which_one_failed_are_left_out():
    rule = parse_sentence("mse of a is lower than that of b")
    table = {("a", "mse"): [1.0, None, 1.1, 0.9], ("b", "mse"): [2.0, 0.0, 2.2, None]}
    assert rule.judge(table).why.startswith("yes: mse of a is lower than that of b: difference -1.05")


def test_nothing_is_lower_where_no_pair_differs():
    rule = parse_sentence("failed of a is lower than that of b")
    assert rule.judge({("a", "failed"): [0.0, 0.0], ("b", "failed"): [0.0, 0.0]}).word == "undecided"


def test_networks_of_felicia_are_judged_on_balanced_images_of_all_sites(tmp_path: Path, monkeypatch) -> None:
    """Each sub-group counts alike, however few images of it there are."""
    claim = CLAIMS["felicia-figure8-synthetic"]
    (entry,) = plan(claim, tmp_path, "quick", 1, phantom=True)["local GAN"]
    small = ("method.rounds=1", "method.steps=1", "method.learner_steps=1", "data.samples=400", "data.size=32")
    small += ("sites.per_class=40", "data.per_class=150", "data.test_total_per_class=20")
    run(entry.study.with_settings(parse_sets([*small, "generator.width=4", "engine.workers=1"])), entry.folder)
    monkeypatch.setattr("polyclinic_lab.generators.NETWORKS", 2)
    found = {row.metric: row.mean for row in measure(("utility synthetic",), {"local GAN": [entry.folder]}, "quick")}
    groups = [value for name, value in found.items() if name.startswith("accuracy of ")]
    assert len(groups) == 4
    assert found["accuracy, synthetic"] == pytest.approx(sum(groups) / 4)
