"""Sites that do nothing but take part in sums, and a coordinator that may lie to them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from plain_study import plain_study

from polyclinic.federation.call import Call, Failure, GateRefused, Reply
from polyclinic.federation.collaborators import FederationSpec
from polyclinic.federation.federation import Federation
from polyclinic.federation.ledger.keys import SeedKeys
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site, SiteState
from polyclinic.federation.sums.settings import Federated, Floor
from polyclinic.federation.sums.site_sums import SiteSums

RUN = "seed 1"


class Adding:
    """The method: each site answers with its own number, times what it was sent."""

    SUMMED: ClassVar = {"answer": "mean"}

    @operation("weights")
    def answer(self, site, weights):
        raise AssertionError("the company answers")

    @classmethod
    def operation_named(cls, name):
        return getattr(getattr(cls, name, None), "operation", None)

    def check_reply(self, federation, call, reply):
        """Nothing to check."""


class Company:
    """An engine of sites. `lie(call)` is what a site gets instead of a call, and `change(call, parcel)` what it sends
    instead of a parcel; `broken`: (site, operation) that fail."""

    simulation = True

    def __init__(self, folder: Path, answers: dict[str, torch.Tensor], settings: Federated, min_sites: int = 3) -> None:
        self.answers, self.settings = answers, settings
        self.sums = SiteSums(settings, RUN, Floor(min_sites), Adding.SUMMED)
        self.sites = {name: self._site(folder, name) for name in answers}
        self.broken: set[tuple[str, str]] = set()
        self.lie: Callable[[Call], Call] = lambda call: call
        self.change: Callable[[Call, Any], Any] = lambda call, parcel: parcel
        self.replies: list[tuple[Call, Reply | Failure]] = []

    @staticmethod
    def _site(folder: Path, name: str) -> Site:
        return Site(
            name, plain_study(seed=1), data=None, trainer=None, state=SiteState(), place=folder / name, keys=SeedKeys(1)
        )

    def call(self, calls: list[Call]) -> list[Reply | Failure]:
        found = [self._answer(self.lie(call)) for call in calls]
        self.replies += zip(calls, found, strict=True)
        return found

    def _answer(self, call: Call) -> Reply | Failure:
        if (call.site, call.operation) in self.broken:
            return Failure(call.site, call.operation, "is down")
        try:
            released = self.change(call, self.work(call))
        except (GateRefused, ParcelRejected) as error:
            return Failure(call.site, call.operation, str(error))
        return Reply(call.site, () if released is None else (released,))

    def work(self, call: Call) -> Parcel | None:
        """What a site releases for a call; raises what it refuses."""
        site = self.sites[call.site]
        site.round = call.round
        if call.operation != "answer":
            payload: dict[str, Any] = {name: parcel.tensors for name, parcel in call.parcels.items()}
            return getattr(self.sums, call.operation)(site, **payload, **call.arguments)
        parcel = Parcel("weights", self.answer(call), {"samples": 10 + len(call.site)})
        gate: Any = SimpleNamespace(check_numbers=lambda _: None)
        [left] = self.sums.outgoing(site, call, gate, (parcel,), "samples")
        return left

    def step(
        self, site: str, name: str, round: int = 1, parcels: dict[str, Parcel] | None = None, **arguments: Any
    ) -> Any:
        """The tensors that a site releases in a step of the sum of `answer`."""
        found = self.work(Call(site, name, round, parcels or {}, {"sum_of": "answer", **arguments}))
        return found.tensors if found is not None else None

    def keys_of(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self.step(name, "give_mask_key")[name] for name in names}

    def give_shares(self, site: str, keys: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.step(site, "give_shares", parcels={"keys": Parcel("keys", keys)})["boxes"]

    def take_shares(self, site: str, boxes: dict[str, torch.Tensor], members: Sequence[str]) -> None:
        order = sorted(boxes)
        mine = {other: boxes[other][order.index(site)] for other in members if other != site}
        self.step(site, "take_shares", parcels={"shares": Parcel("shares", mine)})

    def send_answer(self, site: str, size: int = 5) -> None:
        self.work(Call(site, "answer", 1, {"weights": Parcel("weights", {"w": torch.ones(size)})}))

    def agree(self, site: str, answered: Sequence[str]) -> str:
        """A site's signature of who answered, as hex digits."""
        return self.step(site, "agree", answered=list(answered))["signature"].numpy().tobytes().hex()

    def unmask(self, site: str, answered: Sequence[str], agreed: Any) -> torch.Tensor:
        """The shares that a site gives where these signatures came."""
        return self.step(site, "unmask", answered=list(answered), agreed=agreed)["shares"]

    def answer(self, call: Call) -> dict[str, torch.Tensor]:
        """What a site sends: its own number, times what came."""
        return {name: t * self.answers[call.site] for name, t in call.parcels["weights"].tensors.items()}

    def federation(self) -> Federation:
        spec = FederationSpec(
            study=plain_study(Adding(), seed=1, federation=self.settings),
            sites=tuple(self.answers),
            folder=next(iter(self.sites.values())).folder,
            initial={},
            expected={},
            trainer=None,
        )
        found = Federation(spec, self)
        found.round = 1
        return found

    def total(self, size: int = 50) -> torch.Tensor:
        """The mean that the coordinator learns."""
        [reply] = self.federation().ask_all("answer", weights={"w": torch.ones(size)})
        return reply.weights["w"]

    def refusals(self) -> list[str]:
        return [found.reason for _, found in self.replies if isinstance(found, Failure)]
