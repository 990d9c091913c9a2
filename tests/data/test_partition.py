"""Every partition: who gets which image, and what it says when it cannot."""

import numpy as np
import pytest
from pydantic import ValidationError

from polyclinic.data.dataset import Dataset
from polyclinic.data.labels import mean_ks
from polyclinic.data.partitions import PARTITIONS, assign_to_sites
from polyclinic.errors import BadInput


def dataset(n=600, classes=2, seed=0, **arrays):
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=n) if classes else rng.normal(120, 40, n).astype(np.float32)
    names = tuple(f"class-{c}" for c in range(classes))
    return Dataset(rng.integers(0, 256, (n, 1, 8, 8), dtype=np.uint8), labels, classes=names, **arrays)


def splits(n=600):
    order = np.random.default_rng(1).permutation(n)
    return {"train": order[: n // 2], "validation": order[n // 2 : n * 3 // 4], "test": order[n * 3 // 4 :]}


def lesions(n=2000):
    rng = np.random.default_rng(3)
    group = rng.choice(["nevus", "keratosis", "melanoma", "carcinoma"], n)
    labels = np.isin(group, ["melanoma", "carcinoma"]).astype(np.int64)
    images = np.zeros((n, 1, 8, 8), dtype=np.uint8)
    return Dataset(images, labels, classes=("benign", "malignant"), subgroup=group)


SETTINGS = {
    "iid": {"count": 3},
    "label-skew": {"count": 3, "target_ks": 0.3},
    "dirichlet": {"count": 3, "alpha": 1.0, "min_size": 5},
    "quantity": {"count": 3, "shares": (3, 2, 1)},
    "column": {},
    "clusters": {"count": 3, "mixing": 20},
    "subgroup-bias": {"count": 3, "subgroup": "s1", "share": 0.2, "per_class": 20},
}


def everything():
    """A dataset that every partition can spread."""
    base = dataset()
    rng = np.random.default_rng(5)
    subgroup = np.array([f"s{2 * c + rng.integers(2)}" for c in base.labels])
    return dataset(site=rng.choice(["Graz", "Ulm", "Bern"], len(base)), subgroup=subgroup)


@pytest.mark.parametrize("name", PARTITIONS)
class TestEveryPartition:
    def parts(self, name, seed=0):
        return assign_to_sites(PARTITIONS[name](**SETTINGS[name]), everything(), splits(), seed)

    def test_each_image_goes_to_one_site_of_its_own_split(self, name):
        for split, index in splits().items():
            given = np.concatenate([part[split] for part in self.parts(name).values()])
            assert sorted(given) == sorted(index), "and all are used"

    def test_the_seed_alone_decides(self, name):
        first, again, other = self.parts(name), self.parts(name), self.parts(name, seed=1)
        same = [np.array_equal(first[s]["train"], again[s]["train"]) for s in first]
        assert all(same)
        differs = [not np.array_equal(first[s]["train"], other[s]["train"]) for s in first]
        assert any(differs) == (name != "column")


class TestIid:
    def test_sizes_are_equal_and_patients_stay_at_one_site(self):
        parts = assign_to_sites(PARTITIONS["iid"](count=7), dataset(), splits(), 0)
        sizes = [len(part["train"]) for part in parts.values()]
        assert max(sizes) - min(sizes) <= 1
        patient = np.repeat(np.arange(150), 4)
        data = dataset(patient=patient)
        everyone = {"train": np.arange(600)}
        parts = assign_to_sites(PARTITIONS["iid"](count=4), data, everyone, 0)
        owners = [set(patient[part["train"]]) for part in parts.values()]
        assert sum(map(len, owners)) == 150
        assert {len(part["train"]) for part in parts.values()} <= {148, 152}


class TestQuantity:
    def test_shares_and_a_power_law(self):
        parts = assign_to_sites(PARTITIONS["quantity"](count=3, shares=(3, 2, 1)), dataset(), splits(), 0)
        assert [len(part["train"]) for part in parts.values()] == [150, 100, 50]
        assert [len(part["test"]) for part in parts.values()] == [75, 50, 25]
        parts = assign_to_sites(PARTITIONS["quantity"](count=3, power=1), dataset(n=660), {"train": np.arange(660)}, 0)
        assert [len(part["train"]) for part in parts.values()] == [360, 180, 120]


class TestColumn:
    data = everything()

    def test_images_stay_where_they_were_taken_and_sites_may_be_renamed(self):
        for site, part in assign_to_sites(PARTITIONS["column"](), self.data, splits(), 0).items():
            assert set(self.data.site[part["test"]]) == {site}
        sites = PARTITIONS["column"](names=("Ulm", "Bern"), rename={"Bern": "Berne"})
        parts = assign_to_sites(sites, self.data, splits(), 0)
        assert list(parts) == ["Ulm", "Berne"]
        assert set(self.data.site[parts["Berne"]["train"]]) == {"Bern"}


class TestDirichlet:
    @pytest.mark.parametrize("classes", [4, 0])
    def test_small_alpha_differs_more(self, classes):
        data, everyone = dataset(n=3000, classes=classes), {"train": np.arange(3000)}
        ks = []
        for alpha in (0.1, 1.0, 1000.0):
            parts = assign_to_sites(PARTITIONS["dirichlet"](count=4, alpha=alpha), data, everyone, 0)
            ks.append(mean_ks({s: data.labels[part["train"]] for s, part in parts.items()}))
        assert ks[0] > ks[1] + 0.1 > ks[2] + 0.2
        assert ks[2] < 0.05

    def test_every_site_has_the_fewest_images_and_tests_follow_training(self):
        sites = PARTITIONS["dirichlet"](count=4, alpha=0.2, min_size=30)
        parts = assign_to_sites(sites, dataset(), splits(), 0)
        assert min(len(part["train"]) for part in parts.values()) >= 30
        data = dataset(n=4000, classes=3)
        where = {"train": np.arange(2000), "test": np.arange(2000, 4000)}
        for part in assign_to_sites(PARTITIONS["dirichlet"](count=3), data, where, 0).values():
            shares = [np.bincount(data.labels[part[s]], minlength=3) / 2000 for s in ("train", "test")]
            np.testing.assert_allclose(*shares, atol=0.03)


class TestClusters:
    """Images in two heaps, dark and bright, whatever their class."""

    n = 400
    bright = np.random.default_rng(0).random(n) < 0.4
    labels = np.random.default_rng(1).integers(2, size=n)

    def data(self):
        grey = np.where(self.bright, 200, 50) + np.random.default_rng(2).normal(0, 10, (64, self.n))
        images = np.clip(grey, 0, 255).T.reshape(self.n, 1, 8, 8).astype(np.uint8)
        return Dataset(images, self.labels, classes=("a", "b"))

    def shares_of_bright(self, split="train", **settings):
        where = {"train": np.arange(200), "test": np.arange(200, 400)}
        parts = assign_to_sites(PARTITIONS["clusters"](count=2, **settings), self.data(), where, 0)
        return sorted(self.bright[part[split]].mean() for part in parts.values())

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_clusters_are_found_on_train_and_hold_elsewhere(self, split):
        assert self.shares_of_bright(split, per_class=False) == [0, 1]

    def test_some_are_exchanged(self):
        # of 80 bright and 120 dark images about a quarter change sides: 20/110 and 60/90 bright
        low, high = self.shares_of_bright(mixing=25, per_class=False)
        bright = self.bright[:200].sum()
        quarter, rest = bright / 4, (200 - bright) / 4
        assert low == pytest.approx(quarter / (quarter + 3 * rest), abs=0.02)
        assert high == pytest.approx(3 * quarter / (3 * quarter + rest), abs=0.02)

    def test_each_class_by_itself(self):
        where = {"train": np.arange(400)}
        parts = assign_to_sites(PARTITIONS["clusters"](count=2, per_class=True), self.data(), where, 0)
        for part in parts.values():
            assert set(self.labels[part["train"]]) == {0, 1}
            assert len(set(self.bright[part["train"]])) == 1

    def test_clusters_of_large_images_by_hand(self):
        from polyclinic.data.partitions.clusters import small_pixels

        image = np.arange(64 * 64, dtype=np.uint8).reshape(1, 1, 64, 64)
        pixels = small_pixels(image)
        assert pixels.shape == (1, 32 * 32)
        assert pixels[0, 0] == pytest.approx(image[0, 0, :2, :2].mean() / 255)
        from polyclinic.data.partitions.clusters import leading_directions

        points = np.random.default_rng(0).standard_normal((80, 60)).astype(np.float32) * np.linspace(3, 1, 60)
        centred = (points - points.mean(axis=0)).astype(np.float32)
        ours = leading_directions(centred)
        theirs = np.linalg.svd(centred, full_matrices=False)[2][:50].T
        np.testing.assert_allclose(np.abs(np.sum(ours * theirs, axis=0)), 1, atol=1e-3)


class TestSubgroupBias:
    """The sites of FELICIA's skin lesions: 300 a class, of which 10 melanoma."""

    sites = PARTITIONS["subgroup-bias"](count=2, subgroup="melanoma", share=1 / 30, per_class=300)

    def counts(self, sites, split="train"):
        data = lesions()
        where = {"train": np.arange(1500), "test": np.arange(1500, 2000)}
        parts = assign_to_sites(sites, data, where, 0)
        groups = ("nevus", "keratosis", "melanoma", "carcinoma")
        return {s: [int(np.sum(data.subgroup[part[split]] == g)) for g in groups] for s, part in parts.items()}

    def test_the_first_site_is_biased_and_helpers_may_be_balanced(self):
        counts = self.counts(self.sites)
        assert counts["site-1"] == [150, 150, 10, 290]
        totals = [int(np.sum(lesions().subgroup[:1500] == g)) for g in ("nevus", "melanoma")]
        assert counts["site-2"][0] == totals[0] - 150
        assert counts["site-2"][2] == totals[1] - 10
        settings = {"subgroup": "melanoma", "share": 0.1, "per_class": 100, "others": "balanced"}
        counts = self.counts(PARTITIONS["subgroup-bias"](count=3, **settings))
        assert counts == {"site-1": [50, 50, 10, 90], "site-2": [50] * 4, "site-3": [50] * 4}

    def test_shares_and_names_of_subgroups_by_hand(self):
        """The first site wants one of four, none of the sub-group, and the only one of the other class."""
        data = Dataset(
            np.zeros((6, 1, 8, 8), np.uint8),
            np.array([0, 0, 0, 0, 0, 1]),
            classes=("no", "yes"),
            subgroup=np.array(["a", "a", "a", "a", "b", "c"]),
        )
        sites = PARTITIONS["subgroup-bias"](count=3, subgroup="b", share=0.0, per_class=1)
        plan = sites.plan(data, np.arange(6), ())
        np.testing.assert_allclose(plan.shares, [[0.25, 0.375, 0.375], [0, 0.5, 0.5], [1, 0, 0]])
        sites = PARTITIONS["subgroup-bias"](count=2, subgroup="melanoma", share=0.9, per_class=1000)
        with pytest.raises(BadInput, match=r"^sites.per_class: 1000 images .* need 500 of 'keratosis'"):
            self.counts(sites)
        for names in (("MEL", "melanoma"), ("melanoma", "nevus")):
            sites = PARTITIONS["subgroup-bias"](count=2, subgroup=names, share=1 / 30, per_class=300)
            assert self.counts(sites) == self.counts(self.sites)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("iid", {}, "needs names or count"),
        ("iid", {"names": ("a",), "count": 1}, "not both"),
        ("iid", {"names": ("a", "a")}, "different"),
        ("iid", {"names": ()}, "at least one"),
        ("iid", {"count": 0}, "greater than or equal to 1"),
        ("quantity", {"count": 3, "shares": (1, 1)}, "shares"),
        ("quantity", {"count": 3, "shares": (1, 0, 1)}, "shares"),
        ("column", {"count": 2}, "remove the line count = 2"),
        ("subgroup-bias", {"count": 1, "subgroup": "melanoma"}, "at least two sites"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(name, settings, words):
    with pytest.raises(ValidationError, match=words):
        PARTITIONS[name](**settings)


def one_rare_class():
    labels = (np.arange(600) < 3).astype(np.int64)
    return Dataset(dataset().images, labels, classes=("a", "b"))


def all_alike():
    return Dataset(np.zeros((600, 1, 8, 8), np.uint8), np.zeros(600, np.int64), classes=("a",))


@pytest.mark.parametrize(
    ("name", "settings", "make", "words"),
    [
        ("iid", {"count": 301}, dataset, "without training images"),
        ("column", {"names": ("Grz",)}, everything, r"no site 'Grz' \(did you mean 'Graz'\?\)"),
        ("column", {}, dataset, "^sites.partition: 'column' needs a site"),
        ("column", {"rename": {"Ulm": "Graz"}}, everything, "^sites.rename"),
        ("dirichlet", {"count": 4, "alpha": 0.1, "min_size": 75}, dataset, "^sites.min_size: .*raise sites.alpha$"),
        ("clusters", {"count": 2}, one_rare_class, "^sites.per_class: class 'b' has "),
        ("clusters", {"count": 2}, all_alike, "^sites.count: found no 2 clusters in 300 images"),
        ("subgroup-bias", {"count": 2, "subgroup": "melanom"}, lesions, "'melanom' .*did you mean 'melanoma'"),
        ("subgroup-bias", {"count": 2, "subgroup": "melanoma"}, dataset, "needs classes and sub-groups"),
    ],
)
def test_data_that_a_partition_cannot_spread_are_refused(name, settings, make, words):
    with pytest.raises(BadInput, match=words):
        assign_to_sites(PARTITIONS[name](**settings), make(), splits(), 0)
