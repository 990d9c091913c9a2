"""An engine whose sites answer by a script."""

import torch

from polyclinic.federation.call import Failure, Reply
from polyclinic.federation.ledger.parcel import Parcel

SITES = ("a", "b", "c", "d")
KEYS = ("give_key", "take_keys")  # what sites tell each other before the first parcel goes between two


def weights(value=0.0):
    return {"w": torch.full((4,), float(value))}


class Script:
    """An engine whose sites do what the test says: `act(call)` gives parcels, or raises."""

    simulation = True

    def __init__(self, act=lambda call: ()):
        self.act = act
        self.calls = []
        self.positions = {}
        self.events = []

    def call(self, calls):
        self.calls += [call for call in calls if call.operation not in KEYS]
        return [self._answer(call) for call in calls]

    def _answer(self, call):
        if call.operation in KEYS:
            return Reply(call.site, (Parcel("keys", {call.site: torch.zeros(32, dtype=torch.uint8)}),))
        try:
            return Reply(call.site, tuple(self.act(call)))
        except RuntimeError as error:
            return Failure(call.site, call.operation, str(error))

    def checkpoint(self):
        self.events.append("checkpoint")
        return dict(self.positions)

    def saved_positions(self):
        return {}

    def prune(self, positions):
        self.events.append(("prune", dict(positions)))

    def restore(self, positions):
        self.events.append(("restore", dict(positions)))

    def close(self):
        self.events.append("close")


def failing(*sites, only=None):
    """Sites that fail, at the operation `only` if it is given; the others send weights."""

    def act(call):
        if call.site in sites and call.operation in (only or call.operation):
            raise RuntimeError(f"{call.site} is down")
        return (Parcel("weights", weights(1)),)

    return act
