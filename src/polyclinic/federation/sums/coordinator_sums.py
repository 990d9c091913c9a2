"""The coordinator's half of sums: rows of whole numbers are added as they come, and a secure sum is opened at the end.

A method sees one reply of all sites together: the mean (or the sum) of what they sent, as if one site had sent it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.ledger.keys import public_key
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Operation
from polyclinic.federation.sums.masks import SHARE_BYTES, Context, add_masks, combine_shares, pair_secret, sign_of
from polyclinic.federation.sums.rows import TAIL, Layout, check_layout, check_open, digest_of_question, parcels_of
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

    def __init__(self, settings: Federated, run: str, method: MethodLike | None) -> None:
        self.settings, self.run, self._method = settings, run, method
        self._summed: Mapping[str, str] = getattr(method, "SUMMED", {})
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
            check_layout(parcel.metadata.get("layout"), parcel.tensors["numbers"], allowed)
            if parcel.kind != MASKED:
                check_open(parcel.tensors["numbers"])

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
            found = self._secure(federation, operation, sites, digest_of_question(parcels, arguments), ask)
        else:
            found = self._added(federation, operation, ask(sites))
        if not found.answered:
            return
        yield self._reply(operation, found)

    def _reply(self, operation: str, found: Total) -> Reply:
        declared, count = self._declared(operation), len(found.answered)
        try:
            row, mean = found.row, self._summed[operation] == "mean"
            bits = self.settings.bits
            parcels = parcels_of(row, found.layout, declared.releases, mean=mean, bits=bits, sites=count)
        except ParcelRejected as error:
            raise WorkFailed(f"the sum of '{operation}' over {count} sites cannot be used: {error}") from None
        return Reply(ALL_SITES, parcels)

    def _declared(self, operation: str) -> Operation:
        declared = self._method.operation_named(operation) if self._method else None
        assert declared is not None, "asked of operations that are added up only"
        return declared

    # --- a secure sum, step by step ------------------------------------------------------------------

    def _secure(self, federation: Federation, operation: str, sites: Sequence[str], question: str, ask: Ask) -> Total:
        keys = self._keys(federation, operation, sites)
        given = federation.ask_all("give_shares", sites=list(keys), keys=keys, sum_of=operation)
        boxes = {reply.site: _checked_boxes(reply, len(keys)) for reply in given}
        members = self._hand_out(federation, operation, sorted(keys), boxes)
        found = self._added(federation, operation, ask(members))
        answered = found.answered
        needed = max([self.settings.fewest_of(len(keys)), *(_needs(parcel) for parcel in boxes.values())])
        self._require(len(answered), len(keys), needed, operation)
        signed = federation.ask_all("agree", sites=answered, answered=answered, sum_of=operation)
        agreed = {reply.site: _signature(reply) for reply in signed}
        shares = federation.ask_all("unmask", sites=list(agreed), answered=answered, agreed=agreed, sum_of=operation)
        self._require(len(shares), len(keys), needed, operation)
        public = {site: key.numpy().tobytes() for site, key in keys.items()}
        context = Context(self.run, federation.round, operation, public, sorted(boxes))
        opened = Unmasking(context, context.info(question), answered)
        commitments = {site: parcel.tensors["commitment"].numpy().tobytes() for site, parcel in boxes.items()}
        opened.open(found, {reply.site: reply.parcel(SHARES) for reply in shares}, commitments)
        return found

    def _added(self, federation: Federation, operation: str, replies: Iterator[Reply]) -> Total:
        """The sum of what came. A site that sent other tensors than most others did fails, by name."""
        found = Total()
        for reply in replies:
            found.add(reply)
        reason = "its answer has other tensors than those of the other sites"
        federation.note_failures([Failure(site, operation, reason) for site in found.others])
        return found

    def _keys(self, federation: Federation, operation: str, sites: Sequence[str]) -> dict[str, Tensor]:
        replies = federation.ask_all("give_mask_key", sites=sites, sum_of=operation)
        keys = {reply.site: reply.keys[reply.site] for reply in replies if reply.site in reply.keys}
        return {site: key for site, key in keys.items() if key.dtype == torch.uint8 and key.shape == (32,)}

    def _hand_out(
        self, federation: Federation, operation: str, order: Sequence[str], boxes: Mapping[str, Parcel]
    ) -> list[str]:
        """Give every site the boxes that are for it; those that could open them are the members of the sum."""
        by_site = {
            site: {
                "shares": {other: sent.tensors["boxes"][place] for other, sent in boxes.items() if other != site},
            }
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


class Total:
    """Rows of whole numbers, added modulo 2^64 as they come, by layout. The layout of most sites holds."""

    def __init__(self) -> None:
        self._rows: dict[str, np.ndarray] = {}
        self._sites: dict[str, list[str]] = {}
        self._layouts: dict[str, Layout] = {}

    def add(self, reply: Reply) -> None:
        layout: Layout = [entry for parcel in reply.parcels for entry in parcel.metadata["layout"]]
        form = json.dumps(layout)
        row = _row_of(reply)
        self._layouts[form] = layout
        self._sites.setdefault(form, []).append(reply.site)
        if form in self._rows:
            self._rows[form] += row
        else:
            self._rows[form] = row.copy()

    @property
    def _form(self) -> str:
        """The layout that most sites sent: one of a site that lies is not taken for all."""
        return max(self._sites, key=lambda form: len(self._sites[form]))

    @property
    def answered(self) -> list[str]:
        return self._sites[self._form] if self._sites else []

    @property
    def others(self) -> list[str]:
        """Sites that sent something else."""
        return [site for form, sites in self._sites.items() if form != self._form for site in sites]

    @property
    def layout(self) -> Layout:
        return self._layouts[self._form]

    @property
    def row(self) -> np.ndarray:
        return self._rows[self._form]


@dataclass(frozen=True)
class Unmasking:
    """Takes the masks out of a sum: those of who answered, and what they share with those who did not."""

    context: Context
    info: bytes
    answered: Sequence[str]

    def open(self, total: Total, given: Mapping[str, Parcel], commitments: Mapping[str, bytes]) -> None:
        """WorkFailed where the shares do not give the secrets back that the sites began with."""
        masks: list[tuple[bytes, int]] = []
        for place, member in enumerate(self.context.members):
            secret = self._secret(place, given)
            if member in self.answered:
                if secret is None or hashlib.sha256(secret).digest() != commitments[member]:
                    raise WorkFailed(
                        f"the shares of the own mask of site '{member}' do not fit; a site lied about them"
                    )
                masks.append((secret, -1))
            else:
                masks.extend(self._pairs(member, secret))
        add_masks(total.row, masks, self.info)

    def _secret(self, place: int, given: Mapping[str, Parcel]) -> bytes | None:
        order = sorted(self.context.keys)
        rows = {site: parcel.tensors.get("shares") for site, parcel in given.items()}
        wanted = (len(self.context.members), SHARE_BYTES)
        fitting = {s: row for s, row in rows.items() if row is not None and tuple(row.shape) == wanted}
        return combine_shares({order.index(s) + 1: row[place].numpy().tobytes() for s, row in fitting.items()})

    def _pairs(self, gone: str, secret: bytes | None) -> Iterator[tuple[bytes, int]]:
        """The masks that a site which dropped out left in the others' answers."""
        key = X25519PrivateKey.from_private_bytes(secret) if secret else None
        if key is None or public_key(key) != self.context.keys[gone]:
            raise WorkFailed(f"the shares of the mask key of site '{gone}' do not fit; a site lied about them")
        for site in self.answered:
            yield pair_secret(key, self.context.keys[site]), -sign_of(site, gone, self.context.keys)


def _checked_boxes(reply: Reply, sites: int) -> Parcel:
    parcel = reply.parcel(SHARES)
    wanted = {"boxes": (sites, BOX), "commitment": (32,)}
    found = {name: tuple(t.shape) for name, t in parcel.tensors.items() if t.dtype == torch.uint8}
    if found != wanted:
        raise WorkFailed(f"site '{reply.site}' sent boxes of shares of another form; it must run the same version")
    return parcel


def _needs(boxes: Parcel) -> int:
    """How many sites must be left before a site gives its secrets, as it says itself."""
    told = boxes.metadata.get("needs")
    return told if type(told) is int else 0


def _signature(reply: Reply) -> str:
    signature = reply.parcel(SHARES).tensors.get("signature", torch.empty(0, dtype=torch.uint8))
    return signature.numpy().tobytes().hex() if signature.numel() <= SIGNATURE_BYTES else ""


def _row_of(reply: Reply) -> np.ndarray:
    """The row of a reply, of one parcel or of several with the same numbers at the end."""
    rows = [parcel.tensors["numbers"] for parcel in reply.parcels]
    if len(rows) == 1:  # as it came: a copy of every site's answer takes as long as adding it
        return rows[0].numpy().view(np.uint64)
    return torch.cat([*(row[:-TAIL] for row in rows), rows[0][-TAIL:]]).numpy().view(np.uint64)
