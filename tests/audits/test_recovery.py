"""When a reconstruction counts as a leak: against known answers."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.audits.recovery import Identification, best_guess, identify_unordered, recovery
from polyclinic.randomness import torch_rng


def pictures(count: int, name: str, size: int = 12) -> Tensor:
    """Cloudy pictures around a common one, as images of one body part are."""
    common = torch.rand(1, 1, 4, 4, generator=torch_rng("recovery", "common"))
    coarse = common + 0.3 * torch.randn(count, 1, 4, 4, generator=torch_rng("recovery", name))
    return F.interpolate(coarse, size, mode="bilinear").clamp(0, 1)


TRUTH, HELD_OUT = pictures(8, "truth"), pictures(60, "held out")


def noise(name: str, count: int = 8) -> Tensor:
    return torch.rand(count, 1, 12, 12, generator=torch_rng("recovery", name))


def test_the_images_themselves_are_recovered_and_noise_the_mean_and_others_are_no_leak():
    found = recovery(TRUTH, TRUTH, HELD_OUT, in_order=True)
    assert found.verdict().leak
    assert bool(found.recovered.all())
    assert found.verdict().evidence["recovered"] == 8
    for made in (noise("noise"), HELD_OUT.mean(0).expand(8, -1, -1, -1), torch.full_like(TRUTH, torch.nan)):
        for in_order in (True, False):
            found = recovery(made, TRUTH, HELD_OUT, in_order=in_order)
            assert not found.verdict().leak, found.verdict()
            assert not bool(found.recovered.any())
    assert not recovery(pictures(8, "others"), pictures(30, "more truth"), HELD_OUT, in_order=False).verdict().leak


def test_images_that_came_back_too_bright_are_told_although_not_recovered():
    mean = HELD_OUT.mean(0)
    bright = (mean + 0.5 * (TRUTH - mean) + 0.35).clamp(0, 1)
    found = recovery(bright, TRUTH, HELD_OUT, in_order=True)
    assert int(found.recovered.sum()) < 8
    assert found.identified.count >= 7
    assert found.verdict().leak


def test_order_and_mirroring_matter_only_where_they_are_known():
    swapped = TRUTH.flip(0)
    assert not bool(recovery(swapped, TRUTH, HELD_OUT, in_order=True).recovered.any())
    assigned = recovery(swapped, TRUTH, HELD_OUT, in_order=False)
    assert bool(assigned.recovered.all())
    assert "paired" in str(assigned.verdict())
    assert torch.equal(assigned.truth, swapped)
    plain = recovery(TRUTH.flip(-1), TRUTH, HELD_OUT, in_order=True)
    assert int(plain.recovered.sum()) < 8
    assert bool(recovery(TRUTH.flip(-1), TRUTH, HELD_OUT, in_order=True, augmentation=("flip",)).recovered.all())


def test_the_guess_is_the_nearest_held_out_image_or_their_mean():
    mean = HELD_OUT.mean(0, keepdim=True)
    guess = best_guess(torch.cat([HELD_OUT[3:4] + 0.001, mean + 0.001]), HELD_OUT)
    torch.testing.assert_close(guess, torch.cat([HELD_OUT[3:4], mean]))
    assert bool((best_guess(TRUTH, HELD_OUT[:0]) == 0.5).all())


def test_found_images_that_share_a_neighbour_or_say_nothing_are_rarely_told():
    """Eight copies of one picture all lie closer to the same set: by chance in half of the cases."""
    same = pictures(1, "alone").expand(8, -1, -1, -1)
    told = identify_unordered(same, pictures(40, "candidates"), HELD_OUT)
    assert told.chance > 0.1
    # Of 200 fresh sets, at most 5 at a level of 1 %: 2 are expected.
    told = [identify_unordered(noise(f"a{n}", 4), pictures(4, f"b{n}"), HELD_OUT).chance <= 0.01 for n in range(200)]
    assert sum(told) <= 5


def test_only_a_sites_own_images_are_drawn(tmp_path, monkeypatch):
    """Of a sum over sites, which knows images of all."""
    drawn = []
    monkeypatch.setattr("polyclinic.data.plots.contact_sheet", lambda rows, *_: drawn.append(rows))
    own = torch.arange(8) < 3
    found = recovery(TRUTH.flip(0), TRUTH, HELD_OUT, in_order=False, own=own)
    assert len(found.truth) == 8
    found.draw(tmp_path / "found.png")
    theirs = {image.numpy().tobytes() for image in (TRUTH[:3] * 255).round().to(torch.uint8)}
    assert {image.numpy().tobytes() for image in drawn[0]["target"]} == theirs
    assert list(drawn[0]) == ["target", "reconstruction"]  # a guess may be another site's
    recovery(TRUTH, TRUTH, HELD_OUT, in_order=False, own=own & False).draw(tmp_path / "none.png")
    assert len(drawn) == 1


def test_one_image_is_told_only_with_enough_held_out_ones_and_of_fewer_than_were_searched_for():
    few = recovery(TRUTH[:1], TRUTH[:1], HELD_OUT[:5], in_order=False).identified
    assert (few.count, few.chance, few.others) == (1, pytest.approx(1 / 6), 5)
    assert "too few images to tell" in few.words(0.01)
    enough = identify_unordered(TRUTH[:3], TRUTH[:3], HELD_OUT)
    assert enough.chance == pytest.approx(1 / 39711)  # 3 of 63
    assert "too few" not in enough.words(0.01)
    assert "than to 60 held-out ones" in enough.words(0.01)
    found = recovery(torch.cat([noise("more", 2), TRUTH[:3]]), TRUTH[:3], HELD_OUT, in_order=False)
    assert len(found.truth) == 3
    assert bool(found.recovered.all())


def test_an_image_that_held_out_images_or_a_guess_give_as_well_is_not_recovered():
    truth = (HELD_OUT[:4] + 0.01).clamp(0, 1)  # such as the same patient's next picture
    found = (truth + 0.05 * (noise("near", 4) - 0.5)).clamp(0, 1)
    result = recovery(found, truth, HELD_OUT, in_order=True)
    assert float(result.error.max()) < 0.005
    assert not bool(result.recovered.any())
    blurred = recovery(torch.full_like(TRUTH, 0.5), TRUTH, HELD_OUT[:0], in_order=True)
    assert not blurred.recovered.any()
    assert recovery(TRUTH, TRUTH, HELD_OUT[:0], in_order=True).recovered.all()


@pytest.mark.parametrize(("chance", "leak"), [(0.0009, True), (0.002, False)])
def test_a_chance_counts_up_to_the_level(chance: float, leak: bool):
    nothing = recovery(torch.full_like(TRUTH, 0.5), TRUTH, TRUTH + 0.3, in_order=True)
    told = dataclasses.replace(nothing, identified=Identification(5, 8, chance, 20))
    assert told.verdict(0.001).leak == leak
    assert told.verdict(0.01).leak
