"""Layers that check a call: whom the answer is for, what the operation takes, and the form of what came. No image is
looked at, so that a refusal tells nothing about any. After the work: the kinds that the operation declares."""

from __future__ import annotations

from polyclinic.data.dataset import SPLITS
from polyclinic.federation.call import COORDINATOR, Expected, GateRefused
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.layers.sealing import unseal
from polyclinic.federation.ledger.keys import is_countersigned, signer_of_line
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.operation import FRONT, signature_of
from polyclinic.federation.site import SiteState
from polyclinic.federation.transaction import Parcels, Transaction


class OwnName(Layer):
    """One host serves one site: under each other name it would have a budget of its own."""

    def arriving(self, transaction: Transaction) -> None:
        self.sites.refuse_other_names([transaction.call.site])


class TakenCall(Layer):
    """The operation answers to who asks, and takes what came."""

    def arriving(self, transaction: Transaction) -> None:
        call, declared, is_open = transaction.call, transaction.declared, transaction.call.to == COORDINATOR
        if declared.releases and is_open == (declared.partner == "sites"):
            only = "another site only, sealed, and the coordinator" if is_open else "the coordinator, and a site"
            raise ParcelRejected(f"'{call.operation}' releases to {only} asked")
        unknown = set(transaction.splits) - set(SPLITS)
        if unknown:
            raise ParcelRejected(f"'{call.operation}': there is no split '{unknown.pop()}'; use {', '.join(SPLITS)}")
        try:
            signature_of(transaction.work).bind(None, **{**call.parcels, **call.arguments})
        except TypeError as error:
            raise ParcelRejected(f"'{call.operation}' does not take what came with it: {error}") from None


class TakenByHospital(TakenCall):
    """The same, without what exists in simulation only, and without scores of training images."""

    def arriving(self, transaction: Transaction) -> None:
        if transaction.declared.partner == "simulator":
            raise GateRefused(f"'{transaction.call.operation}': this exists in simulation only")
        super().arriving(transaction)
        if "split" in signature_of(transaction.work).parameters and "train" in transaction.splits:
            raise GateRefused("scores of training images never leave a deployed site")


class SumSteps(Layer):
    """What is a part of a sum is the coordinator's to ask, in a study that adds up so."""

    def arriving(self, transaction: Transaction) -> None:
        call, sums = transaction.call, self.host.sums
        secret = call.operation in sums.secure_only
        if call.to != COORDINATOR and (secret or call.operation in sums.covered):
            raise ParcelRejected(f"'{call.operation}' is a part of a sum, which the coordinator adds up; nobody else")
        if secret and sums.settings.sum != "secure":
            raise ParcelRejected(f"'{call.operation}' is a part of secure sums, and federation.sum is not 'secure'")


class RoundOfStudy(Layer):
    """The study has this round."""

    def arriving(self, transaction: Transaction) -> None:
        round, rounds = transaction.call.round, self.spec.method.rounds
        if type(round) is not int or not 0 <= round <= rounds:
            raise ParcelRejected(f"the study has rounds 0 to {rounds}, and round {round!r} came")


class OpenedSite(Layer):
    """The site's state, images, ledger and gate are at hand."""

    def arriving(self, transaction: Transaction) -> None:
        transaction.site = self.sites.get(transaction.call.site, transaction.group)


class CountersignedHead(Layer):
    """The head of the site's ledger that came with a call is kept, if site and coordinator have signed it."""

    def arriving(self, transaction: Transaction) -> None:
        anchor, site = transaction.call.anchor, transaction.call.site
        if anchor is None or self.spec.kit is None:
            return
        own, others = self.sites.key_ring.verifying_keys(site), self.sites.key_ring.verifying_keys(COORDINATOR)
        if signer_of_line(own, anchor.digest, anchor.signature) is None:
            raise ParcelRejected("the ledger's head that came with the call is not signed by this site")
        if not is_countersigned(others, self.spec.folder.name, site, anchor):
            raise ParcelRejected("the ledger's head that came with the call is not signed by the coordinator's key")
        self.sites.ledgers[site].take_anchor(anchor)


class Begin(Layer):
    """From here on a failure undoes what changed at the site."""

    def arriving(self, transaction: Transaction) -> None:
        transaction.site.round = transaction.call.round
        state = transaction.site.state
        transaction.before = SiteState(state)
        transaction.before.changed = state.changed


class Unsealed(Layer):
    """What another site sealed for this one is opened; some operations take nothing else."""

    def arriving(self, transaction: Transaction) -> None:
        call = transaction.call
        for name, parcel in call.parcels.items():
            is_sealed = parcel.kind == SEALED
            if transaction.declared.partner == "sites" and not is_sealed:
                raise ParcelRejected(f"'{call.operation}' takes what another site sealed, and {parcel.kind} came open")
            transaction.received[name] = unseal(transaction.site, parcel, call) if is_sealed else parcel


class ExpectedForm(Layer):
    """What came is what the site expects of its kind."""

    def arriving(self, transaction: Transaction) -> None:
        for parcel in transaction.received.values():
            self.spec.expected.get(parcel.kind, Expected(parcel.kind)).check(parcel)


class OwnArguments(Layer):
    """Each parcel has the kind that the operation takes as its argument, and weights have all names that are shared.

    What is checked of a parcel follows from its kind, so the kind is the operation's to say, and not the sender's.
    """

    def arriving(self, transaction: Transaction) -> None:
        for name, parcel in transaction.received.items():
            check_argument(transaction, name, parcel)


class Declared(Layer):
    """Nothing leaves of a kind that the operation does not declare. What passes here is what the operation made."""

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        for parcel in parcels:
            if parcel.kind not in transaction.declared.releases:
                raise LookupError(f"'{transaction.call.operation}' did not declare that it releases {parcel.kind}")
        transaction.made = parcels
        return parcels


def check_argument(transaction: Transaction, name: str, parcel: Parcel) -> None:
    """ParcelRejected unless the operation takes this parcel, opened, as the argument `name`."""
    declared = transaction.declared
    kind = declared.kind_of(name)
    if parcel.kind != kind:
        raise ParcelRejected(f"'{declared.address}' takes {kind} as '{name}', and {parcel.kind} came in their place")
    if kind == "weights":
        _check_names(transaction, name, parcel)


def _check_names(transaction: Transaction, name: str, weights: Parcel) -> None:
    """ParcelRejected unless weights name all that the method shares of a network: a name that is left out would
    keep the value that it has, which may be of the site's own model."""
    came, site = weights.tensors.keys(), transaction.site
    taken = signature_of(transaction.work).parameters.get(name)
    if not came and taken is not None and taken.default is None:
        return
    missing: set[str] = set()
    for trainer in (site.trainer, *site.trainers):
        whole = set(trainer.model.state_dict())
        shared = whole - trainer.local_names or whole
        if transaction.declared.takes.get(name) == FRONT:
            shared = set(trainer.split(trainer.model)[0].state_dict())
        if came in (whole, shared):
            return
        missing = missing or (shared - came)
    left_out = ", ".join(sorted(missing)[:3]) or "nothing"
    raise ParcelRejected(f"weights: the names are not those that the method shares; left out: {left_out}")
