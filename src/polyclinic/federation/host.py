"""The host of sites: runs operations at the sites of one process; an engine speaks to it only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from polyclinic.federation.call import Call, LooksOn, Reply, may_depend_on_images
from polyclinic.federation.layers import DEPLOYED, SIMULATED, Inspection, Kinds, Layer
from polyclinic.federation.layers.layer import Parcels, Transaction
from polyclinic.federation.layers.sealing import KeyExchange
from polyclinic.federation.layers.stopped import refuse_while_stopped
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.open_sites import OpenSites
from polyclinic.federation.operation import Operation, work_at
from polyclinic.federation.site import HostSpec, Site, SitePosition
from polyclinic.federation.sums.settings import floor_of
from polyclinic.federation.sums.site_sums import SiteSums
from polyclinic.randomness import seeded


class SiteHost:
    """Runs operations at the sites of one process: a call passes the layers, the work is done, its answer passes them.

    `layers/__init__.py` has the lists of layers, which are the specification of what happens in which order.
    """

    #: sites that may work at once in a grouped operation: all of them are open
    GROUPED = 64

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.keys = KeyExchange()
        self.method = spec.study.method
        pinned = len(spec.kit.keys.pinned()) if spec.kit else 0
        floor = floor_of(spec.policy, pinned)
        self.sums = SiteSums(spec.study.federation, spec.run_name, floor, getattr(self.method, "SUMMED", {}))
        self.sites = OpenSites(spec)
        #: whether replies go to the coordinator as they are, in this process, and not as bytes
        self.by_reference = False
        lists = DEPLOYED if spec.policy.deployed else SIMULATED
        self.layers = {kind: kind(self) for kind in dict.fromkeys(kind for of_list in lists for kind in of_list)}
        self._arriving, self._working, self._leaving, self._left = (self._needed(of_list) for of_list in lists)
        self._alone = any(layer.alone for layer in (*self._working, *self._left))

    def _needed(self, kinds: Kinds) -> list[Layer]:
        return [layer for layer in (self.layers[kind] for kind in kinds) if layer.is_needed()]

    @property
    def inspection(self) -> Layer:
        """The incoming check."""
        return self.layers[Inspection]

    def handle(self, call: Call) -> Reply:
        """Run one call. Whatever it raises is the site's failure."""
        [answer] = self.handle_group([call])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def handle_group(self, calls: Sequence[Call]) -> list[Reply | Exception]:
        """Run an operation at several sites at once: each arrives, one work is done, each leaves.

        An exception in the answers is one site's failure. Where the work itself fails, it fails for all of them.
        """
        if len(calls) > 1 and not self.is_grouped(calls[0].operation, len(calls)):
            return [answer for call in calls for answer in self.handle_group([call])]
        work, declared = self._operation(calls[0].operation)
        asked = [Transaction(call, work, declared, [one.site for one in calls]) for call in calls]
        with contextlib.ExitStack() as held:
            for one in asked:
                held.enter_context(one.held)
            answers: dict[str, Any] = {
                one.call.site: self._attempt([one], self._arrive, one, working=False) for one in asked
            }
            arrived = [one for one in asked if answers[one.call.site] is None]
            made: Any = self._attempt(arrived, self._work, arrived) if arrived else []
            for place, one in enumerate(arrived):
                failed = isinstance(made, Exception)
                answers[one.call.site] = made if failed else self._attempt([one], self._leave, one, made[place])
        return list(answers.values())

    def _attempt(
        self, transactions: Sequence[Transaction], step: Callable[..., Any], *arguments: Any, working: bool = True
    ) -> Any:
        """What a step gives, or the exception that it raises. Then nothing has happened at the sites; and one that may
        depend on a deployed site's images suspends the study."""
        try:
            return step(*arguments)
        except BaseException as error:
            for one in transactions if not isinstance(error, LooksOn) else ():
                one.undo()
            if not isinstance(error, Exception):
                raise
            if self.spec.kit and may_depend_on_images(error, working=working):
                self.spec.kit.suspensions.suspend(self.spec.folder.name, f"{type(error).__name__}: {error}")
            return error

    def _arrive(self, transaction: Transaction) -> None:
        for layer in self._arriving:
            layer.arriving(transaction)

    def _work(self, arrived: Sequence[Transaction]) -> list[Parcels]:
        """What each site makes, before a layer has seen it. Layers around the work are for a site that works alone."""
        first = arrived[0]
        # dropout draws from global state
        gpus = range(torch.cuda.device_count())
        with seeded(*first.site.address(first.declared.address, first.call.round), gpus=gpus):
            for layer in self._working if len(arrived) == 1 else ():
                first.held.enter_context(layer.around(first))
            made = work_at([one.site for one in arrived], first.work, [one.payload for one in arrived])
            return [_parcels(released) for released in made]

    def _leave(self, transaction: Transaction, parcels: Parcels) -> Reply:
        for layer in self._leaving:
            parcels = layer.leaving(transaction, parcels)
        transaction.sent = parcels
        for layer in self._left:
            layer.left(transaction)
        site, ledger = transaction.call.site, self.sites.ledgers[transaction.call.site]
        return (
            Reply(site, parcels, ledger.head)
            if ledger.is_settled
            else Reply(site, parcels, head_soon=lambda: ledger.head)
        )

    def is_grouped(self, operation: str, sites: int) -> bool:
        """Whether the plans of so many sites may be carried out at once in this operation; all have one network."""
        plan, spec = self._operation(operation)[1].plan, self.spec
        if plan is None or spec.trainers:
            return False
        return plan.may_group(self.method, spec.trainer, sites, noted=self._alone)

    def can_divide(self, operation: str) -> bool:
        """Whether so many sites that not all are open at once may do an operation in groups, one after the other."""
        plan = self._operation(operation)[1].plan
        return plan is not None and plan.divides

    def _operation(self, name: str) -> tuple[Callable[..., Any], Operation]:
        """An operation of the method, or of the key exchange and the sums of every site, and what it declares."""
        for owner in (self.method, self.keys, self.sums, *self.spec.more_operations):
            found: Any = getattr(owner, name, None)
            if hasattr(found, "operation"):
                return found, found.operation
        raise LookupError(f"method '{self.method.name}' has no operation '{name}'")

    # --- states between calls -----------------------------------------------------------------------

    def checkpoint(self) -> dict[str, SitePosition]:
        """Write every changed state to disk; the position of every site this host has worked for."""
        return self.sites.checkpoint()

    def settle(self) -> None:
        """Write the lines of all ledgers that wait for digests."""
        self.sites.settle()

    def save(self, name: str) -> SitePosition:
        """Write a site's state to disk if it has changed; where the site stands now."""
        return self.sites.save(name)

    def resident(self) -> list[Site]:
        """The sites in memory now."""
        return self.sites.resident()

    def restore(self, positions: Mapping[str, SitePosition]) -> None:
        """Forget what happened after the given positions."""
        self.sites.restore(positions)

    def drop_old_versions(self, names: Mapping[str, SitePosition]) -> None:
        """Delete states that a durable checkpoint no longer needs."""
        if self.spec.kit:
            self.sites.refuse_other_names(names)
            refuse_while_stopped(self.spec.kit)
        self.sites.drop_old_versions(names)


def _parcels(released: Any) -> Parcels:
    if released is None:
        return ()
    return (released,) if isinstance(released, Parcel) else tuple(released)
