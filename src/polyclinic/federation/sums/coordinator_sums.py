"""The coordinator's half of sums: rows of whole numbers are added as they come, and a secure sum is opened at the end.

A method sees one reply of all sites together: the mean (or the sum) of what they sent, as if one site had sent it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.ledger.keys import public_key
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Operation
from polyclinic.federation.sums import arithmetic
from polyclinic.federation.sums.settings import MOST_SITES, Federated
from polyclinic.federation.sums.site_memory import SIGNATURE_BYTES
from polyclinic.federation.sums.site_sums import BOX, MASKED, SHARES

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import MethodLike
    from polyclinic.federation.federation import Federation

#: the name under which a method gets the reply of all sites together
ALL_SITES = "all sites"
#: asks sites for the method's own operation, and gives the replies as they come
Ask = Callable[[Sequence[str]], Iterator[Reply]]


class CoordinatorSums:
    """Adds up what sites send, as the table [federation] says."""

    def __init__(self, settings: Federated, run: str, method: MethodLike | None, summed: Mapping[str, str]) -> None:
        """`summed`: what of the method's operations is added up, and how."""
        self.settings, self.run, self._method, self._summed = settings, run, method, summed
        #: operations of which the sites' replies are added up
        self.covered = frozenset(self._summed) if settings.sum != "float" else frozenset()

    def check(self, call: Call, reply: Reply) -> None:
        """ParcelRejected for a reply that is no row of whole numbers, or rows, that this operation can have."""
        declared = self._declared(call.operation)
        wanted = (MASKED,) if self.settings.sum == "secure" else declared.releases
        kinds = [parcel.kind for parcel in reply.parcels]
        if sorted(kinds) != sorted(wanted):
            raise ParcelRejected(f"parcels of {', '.join(kinds) or 'no kind'} came, and {', '.join(wanted)} were asked")
        for parcel in reply.parcels:
            if set(parcel.tensors) != {"numbers"}:
                raise ParcelRejected(f"{parcel.kind}: a summand holds 'numbers', and nothing else")
            allowed = declared.releases if parcel.kind == MASKED else (parcel.kind,)
            arithmetic.check_layout(parcel.metadata.get("layout"), parcel.tensors["numbers"], allowed)
            if parcel.kind != MASKED:
                arithmetic.check_open(parcel.tensors["numbers"])

    def collect(
        self,
        federation: Federation,
        operation: str,
        sites: Sequence[str],
        parcels: Mapping[str, Parcel],
        arguments: Mapping[str, Any],
        ask: Ask,
    ) -> Iterator[Reply]:
        """One reply of all sites together; WorkFailed where their sum cannot be opened."""
        if len(sites) > MOST_SITES:
            raise WorkFailed(f"a sum of whole numbers takes up to {MOST_SITES:,} sites, and there are {len(sites):,}")
        if self.settings.sum == "secure":
            found = self._secure(federation, operation, sites, arithmetic.digest_of_question(parcels, arguments), ask)
        else:
            found = self._added(federation, operation, ask(sites))
        if not (count := len(found.answered)):
            return
        kinds, mean = self._declared(operation).releases, self._summed[operation] == "mean"
        try:
            summed = arithmetic.parcels_of(
                found.row, found.layout, kinds, mean=mean, bits=self.settings.bits, sites=count
            )
        except ParcelRejected as error:
            raise WorkFailed(f"the sum of '{operation}' over {count} sites cannot be used: {error}") from None
        yield Reply(ALL_SITES, summed)

    def _declared(self, operation: str) -> Operation:
        declared = self._method.operation_named(operation) if self._method else None
        assert declared is not None, "asked of operations that are added up only"
        return declared

    # --- a secure sum, step by step ------------------------------------------------------------------

    def _secure(self, federation: Federation, operation: str, sites: Sequence[str], question: str, ask: Ask) -> Total:
        replies = federation.ask_all("give_mask_key", sites=sites, sum_of=operation)
        told = {reply.site: reply.keys[reply.site] for reply in replies if reply.site in reply.keys}
        keys = {site: key for site, key in told.items() if key.dtype == torch.uint8 and key.shape == (32,)}
        sealed = federation.ask_all("give_shares", sites=list(keys), keys=keys, sum_of=operation)
        boxes = {reply.site: _checked_boxes(reply, len(keys)) for reply in sealed}
        members = self._hand_out(federation, operation, sorted(keys), boxes)
        found = self._added(federation, operation, ask(members))
        answered = found.answered
        # how many sites must be left before a site gives its secrets, as each says itself
        least = [n for parcel in boxes.values() if type(n := parcel.metadata.get("needs")) is int]
        needed = max([self.settings.fewest_of(len(keys)), *least])
        self._require(len(answered), len(keys), needed, operation)
        signed = federation.ask_all("agree", sites=answered, answered=answered, sum_of=operation)
        agreed = {reply.site: _signature(reply) for reply in signed}
        shares = federation.ask_all("unmask", sites=list(agreed), answered=answered, agreed=agreed, sum_of=operation)
        self._require(len(shares), len(keys), needed, operation)
        public = {site: key.numpy().tobytes() for site, key in keys.items()}
        context = arithmetic.Context(self.run, federation.round, operation, public, sorted(boxes))
        commitments = {site: parcel.tensors["commitment"].numpy().tobytes() for site, parcel in boxes.items()}
        given = {reply.site: reply.parcel(SHARES) for reply in shares}
        unmask(found, context, context.info(question), given, commitments)
        return found

    def _added(self, federation: Federation, operation: str, replies: Iterator[Reply]) -> Total:
        """The sum of what came. A site that sent other tensors than most others did fails, by name."""
        by_form: dict[str, Total] = {}
        for reply in replies:
            layout: arithmetic.Layout = [entry for parcel in reply.parcels for entry in parcel.metadata["layout"]]
            form, row = json.dumps(layout), _row_of(reply)
            if form in by_form:
                np.add(by_form[form].row, row, out=by_form[form].row)
                by_form[form].answered.append(reply.site)
            else:
                by_form[form] = Total(layout, row.copy(), [reply.site])
        # the layout of most sites holds: one of a site that lies is not taken for all
        most = max(by_form.values(), key=lambda one: len(one.answered), default=Total([], np.empty(0, np.uint64), []))
        others = [site for one in by_form.values() if one is not most for site in one.answered]
        reason = "its answer has other tensors than those of the other sites"
        federation.note_failures([Failure(site, operation, reason) for site in others])
        return most

    def _hand_out(
        self, federation: Federation, operation: str, order: Sequence[str], boxes: Mapping[str, Parcel]
    ) -> list[str]:
        """Give every site the boxes that are for it; those that could open them are the members of the sum."""
        by_site = {
            site: {"shares": {other: sent.tensors["boxes"][place] for other, sent in boxes.items() if other != site}}
            for place, site in enumerate(order)
            if site in boxes
        }
        self._require(len(boxes), len(order), self.settings.fewest_of(len(order)), operation)
        replies = federation.ask_all("take_shares", sites=list(boxes), by_site=by_site, sum_of=operation)
        return [reply.site for reply in replies]

    def _require(self, left: int, sites: int, needed: int, operation: str) -> None:
        if left < needed:
            raise WorkFailed(
                f"the secure sum of '{operation}' cannot be opened: {left} of {sites} sites are left, and {needed} are "
                "needed (federation.threshold, or the policies of the sites)"
            )


class Total(NamedTuple):
    """Rows of whole numbers, added modulo 2^64 as they come, and the sites whose rows these were."""

    layout: arithmetic.Layout
    row: np.ndarray
    answered: list[str]


def unmask(
    total: Total,
    context: arithmetic.Context,
    info: bytes,
    given: Mapping[str, Parcel],
    commitments: Mapping[str, bytes],
) -> None:
    """Take the masks out of a sum: those of who answered, and what they share with those who did not.

    WorkFailed where the shares do not give the secrets back that the sites began with.
    """
    masks: list[tuple[bytes, int]] = []
    for place, member in enumerate(context.members):
        secret = _secret(context, place, given)
        if member in total.answered:
            if secret is None or hashlib.sha256(secret).digest() != commitments[member]:
                raise WorkFailed(f"the shares of the own mask of site '{member}' do not fit; a site lied about them")
            masks.append((secret, -1))
            continue
        key = X25519PrivateKey.from_private_bytes(secret) if secret else None
        if key is None or public_key(key) != context.keys[member]:
            raise WorkFailed(f"the shares of the mask key of site '{member}' do not fit; a site lied about them")
        # what a site that dropped out left in the others' answers
        pairs = {site: arithmetic.pair_secret(key, context.keys[site]) for site in total.answered}
        masks.extend((secret, -arithmetic.sign_of(site, member, context.keys)) for site, secret in pairs.items())
    arithmetic.add_masks(total.row, masks, info)


def _secret(context: arithmetic.Context, place: int, given: Mapping[str, Parcel]) -> bytes | None:
    order, wanted = sorted(context.keys), (len(context.members), arithmetic.SHARE_BYTES)
    rows = {site: parcel.tensors.get("shares") for site, parcel in given.items()}
    fitting = {s: row for s, row in rows.items() if row is not None and tuple(row.shape) == wanted}
    return arithmetic.combine_shares({order.index(s) + 1: row[place].numpy().tobytes() for s, row in fitting.items()})


def _checked_boxes(reply: Reply, sites: int) -> Parcel:
    parcel = reply.parcel(SHARES)
    wanted = {"boxes": (sites, BOX), "commitment": (32,)}
    found = {name: tuple(t.shape) for name, t in parcel.tensors.items() if t.dtype == torch.uint8}
    if found != wanted:
        raise WorkFailed(f"site '{reply.site}' sent boxes of shares of another form; it must run the same version")
    return parcel


def _signature(reply: Reply) -> str:
    signature = reply.parcel(SHARES).tensors.get("signature", torch.empty(0, dtype=torch.uint8))
    return signature.numpy().tobytes().hex() if signature.numel() <= SIGNATURE_BYTES else ""


def _row_of(reply: Reply) -> np.ndarray:
    """The row of a reply, of one parcel or of several with the same numbers at the end."""
    rows = [parcel.tensors["numbers"] for parcel in reply.parcels]
    if len(rows) == 1:  # as it came: a copy of every site's answer takes as long as adding it
        return rows[0].numpy().view(np.uint64)
    return torch.cat([*(row[: -arithmetic.TAIL] for row in rows), rows[0][-arithmetic.TAIL :]]).numpy().view(np.uint64)
