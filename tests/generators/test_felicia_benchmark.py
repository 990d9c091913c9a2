"""The benchmark of FELICIA runs, keeps what it found at every look, and its figures can be drawn."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polyclinic.generators.gan.central import CentralTerm
from polyclinic.generators.gan.dcgan import DCGAN
from polyclinic.generators.gan.model import GAN
from polyclinic.generators.gan.networks import Condition
from polyclinic.generators.gan.owners import Federated, Images
from polyclinic.tasks import Target

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def call(script: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done


def fours(folder: Path) -> None:
    """An archive like MNIST's with nothing but strokes of two slants, all called four."""
    rng = np.random.default_rng(0)
    images = np.zeros((120, 28, 28), np.uint8)
    for number, image in enumerate(images):
        for row in range(6, 22):
            slant = (row - 14) // 3 if number % 2 else (14 - row) // 3
            image[row, 13 + slant : 16 + slant] = 150 + rng.integers(100)
    labels = np.full(120, 4)
    np.savez(
        folder / "mnist.npz",
        train_images=images[:90],
        train_labels=labels[:90],
        test_images=images[90:],
        test_labels=labels[90:],
    )


def test_digits_from_end_to_end(tmp_path):
    fours(tmp_path)
    out = tmp_path / "out"
    options = ["--quick", "--only", "digits", "--data", str(tmp_path), "--out", str(out), "--json"]
    grid = ["--steps", "2", "--points", "0", "25", "--lambdas", "0", "1", "--seeds", "1"]
    done = call("felicia.py", *options, str(tmp_path / "all.json"), *grid)
    printed, written = json.loads(done.stdout.splitlines()[-1]), json.loads((tmp_path / "all.json").read_text())
    assert printed == written
    found = json.loads((out / "digits.json").read_text())
    assert found == written["digits"]
    assert found["training"]["owners"] == 8
    assert found["training"]["images_per_owner"] == 2 * 32
    assert {(row["seed"], row["alpha"], row["lambda"], row["owner"]) for row in found["rows"]} == {
        (seed, alpha, weight, owner)
        for seed in (0,)
        for alpha in (0, 25)
        for weight in (0, 1)
        for owner in ("site-1", "site-2")
    }
    assert all(0 <= row["coverage"] <= 1 for row in found["rows"])
    tables = call("felicia_figures.py", str(out)).stdout
    assert "| all, local GAN | all, FELICIA, λ = 1 | other's, local GAN | other's, FELICIA, λ = 1 |" in tables
    assert all((out / name).stat().st_size > 5000 for name in ("digits.png", "digits_coverage.png", "digits_sheet.png"))


def test_speed_needs_no_images():
    found = json.loads(call("felicia.py", "--quick", "--only", "speed").stdout.splitlines()[-1])
    assert [row["owners"] for row in found["speed"]] == [2, 4]
    assert all(row["stacked"] > 0 and row["one_by_one"] > 0 and row["ratio"] > 0 for row in found["speed"])


def test_what_was_found_is_kept_at_every_look(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import felicia_experiments as experiments
    from felicia_common import Scale

    fours(tmp_path)
    kept = []
    scale = Scale(20, 600, 2, 1, (0.0, 1.0), (10,), small={"width": 2, "batch_size": 4})
    found = experiments.digits(tmp_path, scale, lambda text: None, lambda now: kept.append(len(now["rows"])))
    assert kept == [4, 8]
    assert found["training"]["steps"] == 20


def test_tables_average_late_looks_and_choose_by_validation(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import felicia_figures as figures

    rows = [
        {"seed": seed, "images": images, "lambda": 1.0, "validation": validation, "auc": auc}
        for seed, images, validation, auc in (
            *((0, 10, 0.9, 0.1), (0, 20, 0.8, 0.6), (0, 30, 0.7, 0.8)),
            *((1, 10, 0.1, 0.2), (1, 20, 0.2, 0.5), (1, 30, 0.3, 0.7)),
        )
    ]
    assert figures.mean_std(figures.late(rows), "auc")[0] == np.mean([0.7, 0.6])  # looks at 20 and 30 of each seed
    assert [row["images"] for row in figures.best_look(rows)] == [10, 30]
    assert [row["images"] for row in figures.chosen_by_validation(rows)] == [10, 30]
    real = [{"seed": 0, "validation": 0.95, "auc": 0.4}, {"seed": 1, "validation": 0.05, "auc": 0.5}]
    more, spread = figures.gain(figures.late(rows), real, "auc")
    assert (round(more, 6), round(spread, 6)) == (0.2, round(float(np.std([0.3, 0.1], ddof=1)), 6))
    assert [row["auc"] for row in figures.released(rows, real)] == [0.4, 0.7]


class Shapes:
    """Two classes of bright and dark squares; the dark ones are small (rare) or large, as `felicia_common.Material`."""

    def __init__(self, condition: Condition) -> None:
        self.condition: Condition = condition
        rng = np.random.default_rng(0)
        labels, rare = np.arange(160) % 2, np.arange(160) % 4 == 1
        images = rng.integers(110, 140, (160, 1, 16, 16)).astype(np.uint8)
        for image, label, small in zip(images, labels, rare, strict=True):
            side = 2 if small else 5
            image[:, 8 - side : 8 + side, 8 - side : 8 + side] = 20 if label else 230
        subgroup = np.where(labels == 0, "bright", np.where(rare, "small", "large"))
        self.dataset = SimpleNamespace(images=images, labels=labels, subgroup=subgroup)
        self.target = Target(classes=("bright", "dark"))

    def splits(self, seed: int) -> dict[str, np.ndarray]:
        return dict(zip(("train", "validation", "test"), np.split(np.arange(160), (80, 120)), strict=True))

    def images(self, index: np.ndarray) -> Images:
        return Images(torch.from_numpy(self.dataset.images[index]), torch.from_numpy(self.dataset.labels[index]))

    def gan(self, scale: Any) -> GAN:
        return DCGAN(width=2, latent=4, batch_size=8, steps=1, condition=self.condition)

    def term(self, scale: Any) -> CentralTerm:
        return CentralTerm(weight=1.0)


@pytest.mark.parametrize(("condition", "seed"), [("projection", 0), ("apart", 0), ("apart", 3)])
def test_what_made_images_are_worth_and_how_many_are_of_the_rare_kind(monkeypatch, condition, seed):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from felicia_common import Scale
    from felicia_worth import Exam, Expert, worth

    shapes, apart = Shapes(condition), condition == "apart"
    parts = {name: shapes.images(index) for name, index in shapes.splits(0).items()}
    test = shapes.splits(0)["test"]
    exams = {seed: Exam(parts["test"].images, shapes.dataset.labels[test], shapes.dataset.subgroup[test])}
    scale = Scale(2, 600, 1, 1, (0.0, 1.0), learner_steps=15, real_repeats=2, first_seed=seed)
    held = {"a": parts["train"], "b": parts["train"]}
    plan = [{"seed": seed, "lambda": weight} for weight in scale.weights]
    federations = [Federated(seed, weight, held) for weight in scale.weights]
    validation = [parts["validation"]] * 2
    found = worth(
        *(shapes, scale, plan, federations, "a", validation, exams, 6, "small"), lambda text: None, lambda now: None
    )
    assert found["training"]["owners"] == (8 if apart else 4)
    assert found["training"]["images_per_owner"] == (8 if apart else 16)  # with networks for each class: of each
    assert found["expert"] == [1.0]
    assert [(row["lambda"], row["diet"]) for row in found["rows"]] == [
        *((0.0, "synthetic"), (0.0, "augmented"), (1.0, "synthetic"), (1.0, "augmented"))
    ]
    assert found["real"][0]["accuracy"] > 0.95
    expert = Expert(shapes, scale, "small")
    of_kind = [parts["test"].images[torch.from_numpy(exams[seed].subgroup == kind)][:8] for kind in ("large", "small")]
    assert expert.shares([seed, seed], of_kind) == [0.0, 1.0]


def test_a_sub_group_is_marked_against_the_other_class_wherever_the_threshold_lies(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from felicia_worth import Exam

    labels, groups = np.array([0, 0, 0, 1, 1, 1, 1]), np.array(["cat", "dog", "dog", "deer", "deer", "horse", "horse"])
    exam = Exam(torch.empty(7, 1, 8, 8), labels, groups)
    scores = torch.tensor([-3.0, -1.0, 2.0, 3.0, 4.0, -2.0, 1.0])
    found, moved = (exam.mark(torch.stack([torch.zeros(7), scores + by], 1)) for by in (0.0, 10.0))
    # of six pairs with an animal of the other class, horses win the two against the cat's -3 and one against -1
    assert found["auc of horse"] == pytest.approx(3 / 6)
    assert found["auc of deer"] == 1.0
    assert found["auc of cat"] == 1.0
    assert found["auc of dog"] == pytest.approx((3 + 2) / 8)
    assert (found["horse"], found["dog"], moved["horse"], moved["dog"]) == (0.5, 0.5, 1.0, 0.0)
    assert {name: found[name] for name in found if "auc" in name} == {
        name: moved[name] for name in moved if "auc" in name
    }


def test_settings_and_seeds_can_be_asked_for(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import felicia

    asked = "felicia.py --few --width 5 --gan condition=apart saturating=true lr=0.5 --first-seed 3 --seeds 2"
    monkeypatch.setattr(sys, "argv", asked.split())
    scale = felicia._scale("bias", felicia._options())
    assert list(scale.each_seed()) == [3, 4]
    few = {"loss": "hinge", "discriminator_norm": "spectral", "spread": True}
    wanted = {**few, "width": 5, "condition": "apart", "saturating": True, "lr": 0.5}
    assert {name: scale.small[name] for name in wanted} == wanted


def test_what_perfect_discriminators_would_settle_at(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import felicia_balance as ideal

    for loss in (ideal.log, ideal.log_as_written):
        assert ideal.balance(loss, 0.02, 0.0) == pytest.approx((0.02, 0.5))  # nobody but one's own images
        shares = [ideal.balance(loss, 0.1, weight)[0] for weight in (0.0, 1.0, 3.0)]
        assert shares == sorted(shares)
        alike = ideal.balance(loss, 0.1, 1000.0)
        assert alike[0] == pytest.approx(alike[1], abs=1e-2)  # with a large lambda owners make the same
    # with the formula as written that is the middle of what both have, where their losses are level
    level = sum(ideal.log_as_written(r, 0.28) - ideal.log_as_written(1 - r, 0.72) for r in (0.1, 0.5))
    assert level == pytest.approx(0.0, abs=0.05)


def test_neither_owner_of_a_balance_would_rather_make_another_share(monkeypatch):
    """What both pay, written out: all of Eq. 6 as it stands, and what GANs are trained with."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import felicia_balance as ideal

    def slope(real: float, made: float, others: float, written: bool) -> float:
        rare, usual = real / (real + made), (1 - real) / (2 - real - made)  # D of an image of either sub-group
        known, usually_known = made / (made + others), (1 - made) / (2 - made - others)  # D_p of its owner
        if written:
            return math.log((1 - rare) / (1 - usual)) + 3 * math.log(known / usually_known)
        return -math.log(rare / usual) - 3 * math.log((1 - known) / (1 - usually_known))

    for written, prices in ((True, (ideal.log_as_written, ideal.away)), (False, (ideal.log, ideal.other))):
        first, second = ideal.balance(prices[0], 0.02, 3.0, prices[1])
        assert 0.02 < first < second < 0.5
        assert slope(0.02, first, second, written) == pytest.approx(0.0, abs=0.01)
        assert slope(0.5, second, first, written) == pytest.approx(0.0, abs=0.01)


def test_the_balance_ends_in_one_line_of_json(tmp_path):
    done = call("felicia_balance.py", "--quick", "--json", str(tmp_path / "found.json"))
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == json.loads((tmp_path / "found.json").read_text())
    assert [(row["loss"], row["towards"]) for row in printed["rows"]] == [
        *(("log", "other"), ("log", "away"), ("log, as written", "other"), ("log, as written", "away"))
    ]
    assert all(row["made"] == sorted(row["made"]) for row in printed["rows"])


def test_what_generators_pay_can_be_asked_for(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import felicia_common as common

    fours(tmp_path)
    material = common.Material("digits", tmp_path, {"per_class": None, "keep": {"labels": [4]}})
    scale = common.Scale(1, 1, 1, 1, (0.0,))
    assert (material.term(scale).towards, material.term(scale).weight) == ("away", 1.0)
    assert material.term(common.Scale(1, 1, 1, 1, (0.0,), towards="other")).towards == "other"
