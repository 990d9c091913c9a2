"""Rules of all attacks: what each needs and refuses without; and small ones, each by hand."""

import pytest
import torch

from polyclinic import attacks
from polyclinic.attacks.attack import Capability, ThreatModel, verdict_word
from polyclinic.attacks.decoders import LearnedDecoder
from polyclinic.attacks.gradient_inversion.analytic import _sparse_columns
from polyclinic.errors import BadInput

C = Capability
LATENT, BASIC = {C.LATENTS, C.ARCHITECTURE}, {C.GRADIENTS, C.ARCHITECTURE, C.BATCH_SIZE}


@pytest.mark.parametrize(
    ("attack", "needs"),
    [
        (attacks.GradientInversion(), BASIC),
        (attacks.GradientInversion(start="given"), BASIC | {C.PRIOR}),
        (attacks.GradientInversion(label="known"), BASIC | {C.LABELS}),
        (attacks.GradientInversion(kind="weights"), BASIC - {C.GRADIENTS} | {C.WEIGHTS, C.LOCAL_TRAINING}),
        (attacks.LatentInversion(), LATENT | {C.BATCH_NORM_STATISTICS}),
        (attacks.LatentInversion(batch_norm="train"), LATENT),
        (attacks.PairedDecoder(), {C.LATENTS, C.PAIRED_LATENTS}),
        (LearnedDecoder(), LATENT | {C.SIMILAR_IMAGES}),
        (attacks.Projection(), {C.GENERATOR, C.CANDIDATES, C.CANDIDATE_LABELS}),
        (attacks.Projection(guessed=True), {C.GENERATOR, C.CANDIDATES}),
        (attacks.NearestSynthetic(), {C.SYNTHETIC_IMAGES, C.CANDIDATES}),
        (attacks.ShadowModels(), {C.CLASSIFIER, C.CANDIDATES, C.CANDIDATE_LABELS, C.SIMILAR_IMAGES}),
        (attacks.Fishing(), {C.GRADIENTS, C.ARCHITECTURE, C.SIMILAR_IMAGES, C.CHOSEN_WEIGHTS, C.CANDIDATES}),
    ],
)
def test_an_attack_needs_what_it_declares_and_nothing_else(attack, needs):
    assert attack.needs == needs
    attack.check(ThreatModel(granted=frozenset(needs)))
    for one in needs:
        with pytest.raises(BadInput, match=f"grant {one}"):
            attack.check(ThreatModel(granted=frozenset(needs) - {one}))
        assert one.words in str(attack)


def test_columns_with_one_more_zero_than_was_asked_for_are_found():
    columns = torch.tensor([[0.0, 0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 0.0, 0.0, 3.0, 5.0]], dtype=torch.float64).T
    basis = torch.linalg.qr(columns)[0]
    found = _sparse_columns(basis, draws=256)
    assert found.shape == (6, 2)
    unit = columns / columns.norm(dim=0)
    assert sorted((found.T @ unit).abs().amax(1).tolist()) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("told", "word"),
    [
        *(({"verdict": "withstood"}, "withstood"), ({"verdict": "leaks"}, "leaks"), ({"leak": True}, "leaks")),
        *(({"leak": False}, "not tested"), ({"verdict": "no word", "leak": True}, "leaks"), ({}, "not tested")),
    ],
)
def test_the_word_of_a_verdict(told, word):
    assert verdict_word(told) == word
