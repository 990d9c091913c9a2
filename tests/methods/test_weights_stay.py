"""Which methods' weights may stay on a GPU between simulated sites and coordinator."""

from polyclinic.methods import METHODS


def test_only_methods_that_take_weights_wherever_they_lie():
    """A method that comes to this list was checked: it never mixes weights with tensors of a site's state, nor with
    others that lie on the CPU. A subclass that does says `replace(FedAvg.traits, weights_stay=False)`."""
    stay = {name for name in METHODS.builtin if METHODS[name].traits.weights_stay}
    assert stay == {
        "cwt",
        "cwt-replay",
        "fedavg",
        "fedavg-replay",
        "fedavg-share",
        "fedavgm",
        "fedbn",
        "fedprox",
        "standalone",
    }
