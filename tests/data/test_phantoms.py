"""Phantoms: seeded, the same anatomy at every size, and labelled with what is drawn."""

import numpy as np
import pytest
from scipy.ndimage import label

from polyclinic.data.datasets.phantoms.brain import BrainPhantom
from polyclinic.data.datasets.phantoms.chest import SCANNERS, ChestPhantom
from polyclinic.data.datasets.phantoms.fundus import FundusPhantom
from polyclinic.data.datasets.phantoms.hand import HandPhantom, Pose
from polyclinic.data.datasets.phantoms.phantom import Canvas, random_walks
from polyclinic.data.datasets.phantoms.skin import LESIONS, SkinPhantom

PHANTOMS = {
    "fundus-phantom": FundusPhantom,
    "hand-phantom": HandPhantom,
    "chest-phantom": ChestPhantom,
    "brain-phantom": BrainPhantom,
    "skin-phantom": SkinPhantom,
}


def shrink(images, size):
    """Mean over blocks: [N, C, H, W] to [N, C, size, size]."""
    n, channels, side, _ = images.shape
    block = side // size
    return images.reshape(n, channels, size, block, size, block).mean(axis=(3, 5))


@pytest.mark.parametrize("name", PHANTOMS)
class TestEveryPhantom:
    def test_the_same_seed_gives_the_same_images(self, name):
        first, again = (PHANTOMS[name](samples=10, size=28).load() for _ in range(2))
        np.testing.assert_array_equal(first.images, again.images)
        np.testing.assert_array_equal(first.labels, again.labels)

    def test_they_are_drawn_once_for_every_way_to_spread_them(self, name):
        kind = PHANTOMS[name]
        one = kind(samples=10, size=28).load_shared()
        assert kind(samples=10, size=28, fold="1/2", acquisition=0.5, test=0.3).load_shared() is one
        with pytest.raises(ValueError, match="read-only"):
            one.images[0] = 0
        other = kind(samples=10, size=28, seed=1).load_shared()
        assert not np.array_equal(other.images, one.images)
        assert np.array_equal(one.images, kind(samples=10, size=28).load().images)

    def test_more_samples_continue_the_same_series(self, name):
        few, many = (PHANTOMS[name](samples=n, size=28).load() for n in (12, 20))
        np.testing.assert_array_equal(few.images, many.images[:12])
        np.testing.assert_array_equal(few.labels, many.labels[:12])

    def test_the_same_anatomy_at_every_size(self, name):
        small, large = (PHANTOMS[name](samples=10, size=size).load() for size in (32, 256))
        np.testing.assert_array_equal(small.labels, large.labels)
        ours, theirs = small.images.astype(float), shrink(large.images, 32)
        alike = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(ours, theirs, strict=True)]
        unlike = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(ours, theirs[::-1], strict=True)]
        assert min(alike) > 0.9
        assert min(alike) > max(unlike)


class TestFundus:
    def test_two_classes_leave_out_grade_one(self):
        data = FundusPhantom(samples=300, size=28).load()
        assert data.classes == ("healthy", "diseased")
        assert set(data.subgroup) == {"grade-0", "grade-2", "grade-3", "grade-4"}
        np.testing.assert_array_equal(data.labels, data.subgroup != "grade-0")
        assert 0.4 < data.labels.mean() < 0.6

    def test_a_higher_grade_has_more_lesions(self):
        """The same eye drawn at each grade differs from its healthy self in more and more pixels."""
        phantom, canvas = FundusPhantom(samples=10, size=64), Canvas(64)
        changed = np.zeros(5)
        for i in range(12):
            eyes = [phantom.draw(canvas, grade, phantom.rng(i, "anatomy")) for grade in range(5)]
            changed += [np.mean(np.abs(eye - eyes[0]) > 0.05) for eye in eyes]
        assert changed[0] == 0
        assert np.all(np.diff(changed) > 0)


class TestHand:
    def test_ages_in_months(self):
        data = HandPhantom(samples=400, size=28).load()
        assert data.labels.dtype == np.float32
        assert data.unit == "months"
        assert data.label_range == (0, 228)
        assert data.classes == ()
        assert 1 <= data.labels.min() < 40
        assert 200 < data.labels.max() <= 228

    def wrist(self, age):
        """Area of bone in the wrist of some hands at that age."""
        phantom, canvas = HandPhantom(samples=10), Canvas(64)
        pose = Pose(x=0, y=0, scale=1, angle=0)
        return np.mean([phantom._carpals(canvas, pose, age, phantom.rng(i, "anatomy")).mean() for i in range(8)])

    def test_carpal_bones_appear_and_grow(self):
        areas = [self.wrist(age) for age in (1, 24, 60, 100, 160)]
        assert areas[0] < 0.001
        assert np.all(np.diff(areas) > 0)

    def test_growth_plates_close(self):
        """Bones in pieces in a child are whole in an adult."""
        phantom, canvas = HandPhantom(samples=10), Canvas(256)
        pose = Pose(x=0, y=0, scale=1, angle=0)
        hands = {age: phantom._bones(age, phantom.rng(0, "anatomy")).draw(canvas, pose) for age in (96, 235)}
        pieces = {age: label(bones > 0.5)[1] for age, bones in hands.items()}
        assert pieces[96] >= pieces[235] + 12
        assert hands[235].mean() > 1.1 * hands[96].mean()


class TestChest:
    data = ChestPhantom(samples=300, size=28).load()

    def test_two_scanners_and_two_classes(self):
        assert set(self.data.site) == {"scanner-a", "scanner-b"}
        assert self.data.classes == ("normal", "tuberculosis")
        assert 0.35 < self.data.labels.mean() < 0.65

    def test_scanners_can_be_told_apart(self):
        contrast = self.data.images.std(axis=(1, 2, 3))
        a, b = (contrast[self.data.site == s].mean() for s in ("scanner-a", "scanner-b"))
        assert a > 1.15 * b

    def test_one_scanner_alone(self):
        assert set(ChestPhantom(samples=20, size=28, scanner_b=0).load().site) == {"scanner-a"}

    def test_disease_lies_in_the_lungs(self):
        phantom, canvas = ChestPhantom(samples=10), Canvas(64)
        change = np.zeros((64, 64))
        for i in range(20):
            well, sick = (
                phantom.draw(canvas, (state, SCANNERS[1]), phantom.rng(i, "anatomy"))[0] for state in (False, True)
            )
            change += np.abs(sick - well)
        assert change[50:, 8:26].max() < 1e-6  # below the diaphragm
        assert change[10:25, 12:26].mean() > 2 * change[35:45, 12:26].mean() > 0  # mostly in the upper zones


class TestBrain:
    data = BrainPhantom(samples=120, size=28, slices=4).load()

    def test_slices_of_a_patient_share_site_and_number(self):
        assert len(set(self.data.patient)) == 30
        for patient in set(self.data.patient):
            assert len(set(self.data.site[self.data.patient == patient])) == 1

    def test_the_class_is_whether_the_mask_is_empty(self):
        np.testing.assert_array_equal(self.data.masks.any(axis=(1, 2)), self.data.labels == 1)
        assert 0.2 < self.data.labels.mean() < 0.8

    def test_masks_are_bright_where_there_is_no_necrosis(self):
        data = BrainPhantom(samples=200, size=64).load()
        inside, around = [], []
        for image, mask in zip(data.images[:, 0].astype(float), data.masks == 1, strict=True):
            if mask.any():
                inside.append(image[mask].mean())
                around.append(np.median(image[~mask & (image > 30)]))
        assert np.mean(np.array(inside) > around) > 0.7

    def test_masks_are_the_same_at_every_size(self):
        small, large = (BrainPhantom(samples=40, size=size).load().masks for size in (32, 128))
        shrunk = shrink(large[:, None].astype(float), 32)[:, 0] > 0.5
        overlap = 2 * (shrunk & (small == 1)).sum() / (shrunk.sum() + small.sum())
        assert overlap > 0.9


class TestSkin:
    def test_four_lesions_in_two_classes(self):
        data = SkinPhantom(samples=400, size=28).load()
        assert data.classes == ("benign", "malignant")
        for lesion, (its_class, _) in LESIONS.items():
            of_it = data.subgroup == lesion
            assert set(data.labels[of_it]) == {its_class}
            assert 70 < of_it.sum() < 130


class TestCanvas:
    @pytest.mark.parametrize("size", [32, 128])
    def test_an_ellipse_has_its_area(self, size):
        assert Canvas(size).ellipse(0.1, -0.2, 0.5, 0.3, angle=0.7).sum() * (2 / size) ** 2 == pytest.approx(
            np.pi * 0.5 * 0.3, rel=0.02
        )

    def test_the_strongest_spot_counts(self):
        layer = Canvas(64).spots(np.array([0.0, 0.0]), np.array([0.0, 0.0]), 0.3, np.array([0.2, 0.7]))
        assert layer.max() == pytest.approx(0.7, abs=0.01)

    def test_a_texture_has_about_unit_variance_at_every_size(self):
        for size in (32, 256):
            fields = [Canvas(size).texture(np.random.default_rng(i), 12) for i in range(20)]
            assert np.std(fields) == pytest.approx(1, abs=0.15)
            assert np.mean(fields) == pytest.approx(0, abs=0.1)

    def test_walks_end_in_the_same_place_whatever_the_step(self):
        ends = []
        for step in (0.1, 0.005):
            start, heading, length = np.zeros((2, 2)), np.array([0.0, 1.0]), np.array([0.5, 1.0])
            rng = np.random.default_rng(0)
            x, y, _ = random_walks(rng, start, heading, length, bend=0.5, wobble=0.3, step=step)
            ends.append(np.stack([x[:, -1], y[:, -1]]))
        np.testing.assert_allclose(*ends, atol=0.06)
