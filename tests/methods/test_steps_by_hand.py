"""Steps of coordinators and rounds of sites, by hand: momentum, clocks of turns, and who trains in a stack."""

from types import SimpleNamespace

import pytest
import torch

from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods import fedpft
from polyclinic.methods.feder import FedER
from polyclinic.methods.fedpft import FedPFT, Mixture
from polyclinic.randomness import torch_rng

# --- coordinators -----------------------------------------------------------------------------------


# --- FedPFT -----------------------------------------------------------------------------------------


def test_rows_of_a_mixture_are_drawn_around_its_means():
    mixture = Mixture(
        torch.tensor([0.25, 0.75]).double(),
        torch.tensor([[0.0, 10.0], [100.0, 200.0]]).double(),
        torch.tensor([[1.0, 4.0], [9.0, 16.0]]).double(),
    )
    drawn, rng = mixture.sample(6, torch_rng("rows")), torch_rng("rows")
    chosen = torch.multinomial(mixture.shares, 6, replacement=True, generator=rng)
    noise = torch.randn(6, 2, generator=rng, dtype=torch.float64)
    for row, place, own in zip(drawn, chosen.tolist(), noise, strict=True):
        mean, deviation = ([0.0, 10.0], [1.0, 2.0]) if place == 0 else ([100.0, 200.0], [3.0, 4.0])
        assert row.tolist() == pytest.approx([m + d * float(e) for m, d, e in zip(mean, deviation, own, strict=True)])


def sent_mixtures(site, counts):
    tensors = {}
    for label, count in enumerate(counts):
        if count:
            ones = torch.ones(1, 2)
            tensors |= {f"{label}/shares": torch.ones(1), f"{label}/means": label * ones, f"{label}/variances": ones}
    return Reply(site, (Parcel("statistics", tensors, {"counts": counts, "samples": sum(counts)}),))


def test_as_many_features_are_drawn_as_sites_have_images_and_small_classes_are_told(monkeypatch):
    monkeypatch.setattr(fedpft, "head_shape", lambda federation: (2, 3))
    monkeypatch.setattr(FedPFT, "width", lambda self, federation: 2)
    replies = [sent_mixtures("a", [1, 0, 10]), sent_mixtures("b", [0, 12, 10]), sent_mixtures("c", [9, 20, 0])]
    said = []
    federation = SimpleNamespace(ask_all=lambda operation: replies, rng=torch_rng, warn=said.append)
    rows, labels = FedPFT().draw(federation)
    assert labels.tolist() == [0] + [2] * 10 + [1] * 12 + [2] * 10 + [0] * 9 + [1] * 20
    assert rows.shape == (62, 2)
    again = Mixture(torch.ones(1).double(), torch.full((1, 2), 2.0).double(), torch.ones(1, 2).double())
    assert torch.equal(rows[1:11], again.sample(10, torch_rng("mixture a 2")))
    assert [text.split(":")[0] for text in said] == ["site 'a'", "site 'c'"]
    assert "fewer than 10 images of some class" in said[0]


# --- turns of FedER ---------------------------------------------------------------------------------


class Clocks:
    """A federation whose sites hand models on along a ring; those that fail do not begin a turn."""

    def __init__(self, sites, fails=()):
        self.sites, self.fails, self.told, self.evaluated = sites, fails, {}, 0

    def state(self, **given):
        return SimpleNamespace(**given)

    def rounds(self, count, state):
        return range(1, count + 1)

    def rng(self, name):
        return torch_rng(name)

    def alike(self, site, successor):
        return True

    def forward(self, site, give, successor, take, model):
        ring = dict(zip(self.sites, self.sites[1:] + self.sites[:1], strict=True))
        return ring[site] == successor

    def ask_all(self, operation, sites):
        return [SimpleNamespace(site=site) for site in sites if site not in self.fails]

    def evaluate(self):
        self.evaluated += 1

    def report(self, name, figures):
        self.told[name] = figures


@pytest.mark.parametrize(
    ("rounds", "takes", "time", "turns"),
    [
        (2, {"d": 3.0}, 3.0, 8),  # with a fourth site: at 1 b and c begin, at 2 c, and at 3 a has the last turn
        (1, {}, 0.0, 3),  # all begin at once, and nobody is waited for
        (2, {}, 1.0, 6),
        (4, {}, 3.0, 12),
        (2, {"c": 2.0}, 2.0, 6),  # at 1 b begins what a gave it, at 2 a and c
        (3, {"c": 2.0}, 4.0, 9),
        (3, {"c": 0.5}, 2.0, 9),  # who is quick waits for a model
    ],
)
def test_time_is_that_of_the_turns_that_a_round_waits_for(rounds, takes, time, turns):
    federation = Clocks(("a", "b", "c", *takes.keys() - {"c"}))
    FedER(mode="asynchronous", rounds=rounds, turn_takes=takes).run_asynchronously(federation)
    assert federation.evaluated == rounds
    assert federation.told["asynchronous"]["turns"] == turns
    assert federation.told["asynchronous"]["time"] == time


def test_a_round_is_over_where_nobody_can_begin():
    federation = Clocks(("a", "b"), fails=("a", "b"))
    FedER(mode="asynchronous", rounds=2).run_asynchronously(federation)
    assert federation.evaluated == 2
    assert federation.told["asynchronous"] == {"time": 0.0, "turns": 0}
