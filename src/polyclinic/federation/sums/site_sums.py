"""A site's half of sums: its answer as whole numbers, under masks, and the steps by which a secure sum is opened.

The protocol is that of Bonawitz et al. (2017). In each sum a site (1) gives a public key drawn for this sum, (2) sends
every other site a share of that key's private half and a share of the seed of its own mask, sealed with the keys that
the kits pin and bound to the keys of all, (3) takes the others' shares, (4) adds masks to its answer, (5) signs whose
answers came, and (6) where enough sites signed the same, gives one share of each: of the own seed if that site's answer
came, of the mask key if it dropped out. Never both.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from polyclinic.federation.call import GateRefused, GateRefusedData
from polyclinic.federation.ledger.keys import KEY_BYTES, OVERHEAD, SealBroken, open_box, public_key, seal_box
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.sums.arithmetic import (
    SHARE_BYTES,
    TAIL,
    Layout,
    TooLarge,
    add_masks,
    digest_of_question,
    pair_secret,
    row_of,
    sign_of,
    split_secret,
)
from polyclinic.federation.sums.settings import ADD_FINAL_SCORES, ADD_SCORES, EVALUATE, Federated, Floor
from polyclinic.federation.sums.site_memory import (
    OpenSum,
    at_step,
    changed,
    check_agreement,
    keep,
    known,
    note_agreed,
    note_masked,
    note_shared,
    signature_of,
)

if TYPE_CHECKING:
    from polyclinic.federation.call import Call
    from polyclinic.federation.layers.gate import Gate
    from polyclinic.federation.site import Site

#: the kinds of parcel of a secure sum
MASKED, SHARES = "masked", "shares"
#: bytes of the two shares that a site seals for another one, and of their box
TWO_SHARES = 2 * SHARE_BYTES
BOX = TWO_SHARES + OVERHEAD


class SiteSums:
    """The operations of a secure sum, which every site has, and what leaves in a sum instead of an answer."""

    def __init__(self, settings: Federated, run: str, floor: Floor, summed: Mapping[str, str] | None = None) -> None:
        """`run` names the run; `floor` is what the site's policy asks of a sum; `summed` is the method's table."""
        self.settings, self.run, self.floor, self.summed = settings, run, floor, summed or {}
        #: operations of which the answers leave as whole numbers, and those that are steps of a secure sum
        self.covered = frozenset(self.summed) if settings.sum != "float" else frozenset()
        own = {name for name, one in vars(type(self)).items() if hasattr(one, "operation")}
        self.secure_only = own | {name for name, how in self.summed.items() if how == "secure sum"}
        self.steps = frozenset(own)
        #: how scores do not leave in this study: of each site, or added up
        added = frozenset({ADD_SCORES, ADD_FINAL_SCORES})
        self.other_scores = frozenset({EVALUATE}) if added <= self.covered else added

    # --- the steps before and after the answer -------------------------------------------------------

    @operation("keys")
    def give_mask_key(self, site: Site, sum_of: str) -> Parcel:
        """A public key for one sum. A new sum begins: what was left of an earlier one is forgotten."""
        if site.secret and site.round < 1:  # before the first round a one-round method could be asked once more
            raise ParcelRejected(f"a sum of '{sum_of}' was asked for before the first round")
        before = known(site)  # two sums of one answer, of different sites, would give the difference of the two away
        if before and (before.round, before.operation) == (site.round, sum_of):
            raise ParcelRejected(f"a sum of '{sum_of}' has begun in round {site.round}; there is one of each")
        begun = OpenSum(
            run=self.run,
            round=site.round,
            operation=sum_of,
            step="keys",
            mask_key=draw(site, "mask key", sum_of).hex(),
            own_seed=draw(site, "own seed", sum_of).hex(),
            label=secrets.token_hex(8) if site.secret else "",
        )
        keep(site, begun)
        return Parcel("keys", {site.name: _tensor(public_key(begun.private_key))})

    @operation(SHARES)
    def give_shares(self, site: Site, keys: Mapping[str, Tensor], sum_of: str) -> Parcel:
        """Shares of both secrets, sealed for each site of which a key came."""
        found = at_step(site, sum_of, "keys")
        public = {name: _key_bytes(name, key) for name, key in keys.items()}
        self._check_keys(site, found, public)
        count = len(public)
        threshold = self.floor.threshold(self.settings, count)
        found = changed(
            found,
            {
                "step": "shares",
                "keys": {name: key.hex() for name, key in public.items()},
                "threshold": threshold,
                "honest": threshold - self.settings.liars if self.floor.liars <= self.settings.liars else 0,
            },
        )
        note_shared(site, found)
        of_key = self._split(site, found, "mask key", found.mask_key)
        of_seed = self._split(site, found, "own seed", found.own_seed)
        boxes = [self._box(site, found, *one) for one in zip(sorted(public), of_key, of_seed, strict=True)]
        own = found.place(site.name) - 1
        keep(site, changed(found, {"held": {site.name: (of_key[own].hex(), of_seed[own].hex())}}))
        sum_id = found.context(of_all=True).sum_id
        commitment = hashlib.sha256(bytes.fromhex(found.own_seed)).digest()
        tensors = {"boxes": torch.stack(boxes), "commitment": _tensor(commitment)}
        return Parcel(SHARES, tensors, {"sum": {"id": sum_id[:16], "sites": count}, "needs": threshold})

    @operation()
    def take_shares(self, site: Site, shares: Mapping[str, Tensor], sum_of: str) -> None:
        """The shares that the others sealed for this site. Whose shares came, takes part."""
        found = at_step(site, sum_of, "shares")
        unknown = shares.keys() - found.keys.keys() | (shares.keys() & {site.name})
        if unknown:
            raise ParcelRejected(f"shares of '{min(unknown)}' came, which gave no key for this sum")
        held = dict(found.held)
        for sender, box in shares.items():
            plain = self._open_box(site, found, sender, box)
            held[sender] = (plain[:SHARE_BYTES].hex(), plain[SHARE_BYTES:].hex())
        self._check_left(len(held), found.threshold)
        keep(site, changed(found, {"step": "ready", "held": held, "members": tuple(sorted(held))}))

    @operation(SHARES)
    def agree(self, site: Site, answered: Sequence[str], sum_of: str) -> Parcel:
        """The site's signature of who answered. Once a sum: it signs no second set of sites."""
        found = at_step(site, sum_of, "added")
        names = self._members_among(site, found, answered)
        note_agreed(site, found, names)
        keep(site, changed(found, {"step": "agreed", "answered": tuple(sorted(names))}))
        about = {"id": found.context().sum_id[:16], "sites": len(names)}
        return Parcel(SHARES, {"signature": _tensor(signature_of(site, found, names))}, {"sum": about})

    @operation(SHARES)
    def unmask(self, site: Site, answered: Sequence[str], agreed: Mapping[str, str], sum_of: str) -> Parcel:
        """One share of each member: of its own seed if it answered, of its mask key if it did not. Once a sum, and only
        for the set of sites that enough of them signed."""
        found = at_step(site, sum_of, "agreed")
        names = self._members_among(site, found, answered)
        if names != set(found.answered):
            raise ParcelRejected("those who are said to have answered are others than this site agreed to")
        check_agreement(site, found, names, agreed)
        note_agreed(site, found, names)
        rows = [_tensor(bytes.fromhex(found.held[name][name in names])) for name in found.members]
        erased = {"step": "opened", "mask_key": "", "own_seed": "", "held": {}}
        keep(site, changed(found, erased))
        about = {"id": found.context().sum_id[:16], "sites": len(names)}
        return Parcel(SHARES, {"shares": torch.stack(rows)}, {"sum": about})

    def _members_among(self, site: Site, found: OpenSum, answered: Sequence[str]) -> set[str]:
        """Those who are said to have answered; ParcelRejected unless they can be so many sites of this sum."""
        names = set(answered) if isinstance(answered, list | tuple) else set()
        if not names <= set(found.members) or site.name not in names or len(names) != len(answered):
            raise ParcelRejected("those who are said to have answered are not members of this sum, or not this site")
        self._check_left(len(names), found.threshold)
        return names

    # --- the answer itself ---------------------------------------------------------------------------

    def kinds(self, operation: str, releases: tuple[str, ...]) -> tuple[str, ...]:
        """The kinds of parcel that leave for an operation."""
        return (MASKED,) if operation in self.covered and self.settings.sum == "secure" else releases

    def outgoing(
        self, site: Site, call: Call, gate: Gate, parcels: Sequence[Parcel], weighting: str
    ) -> tuple[Parcel, ...]:
        """What leaves instead of these parcels; GateRefusedData where a number is too large for the sum."""
        for parcel in parcels:
            gate.check_numbers(parcel)
        try:
            mean, bits = self.summed[call.operation] == "mean", self.settings.bits
            numbers, layout = row_of(parcels, mean=mean, weighting=weighting, bits=bits)
        except TooLarge as error:
            raise GateRefusedData(f"{error}; lower federation.bits, or optimizer.lr where training diverges") from None
        if self.settings.sum == "secure":
            # what the site says of privacy; nothing where a parcel with content is not covered
            told = [parcel.privacy for parcel in parcels if parcel.tensors]
            privacy = told[0] if told and all(one is not None for one in told) else None
            return (self._masked(site, call, numbers, layout, privacy),)
        # as parcels of the same kinds, for all to see; each has the row's last numbers at its end
        row, open_parcels, start = torch.from_numpy(numbers.view(np.int64)), [], 0
        for parcel in parcels:
            own = [entry for entry in layout if entry[0] == parcel.kind]
            end = start + sum(tensor.numel() for tensor in parcel.tensors.values())
            summand = {"numbers": torch.cat([row[start:end], row[-TAIL:]])}
            open_parcels.append(Parcel(parcel.kind, summand, {"layout": own}, parcel.privacy))
            start = end
        return tuple(open_parcels)

    def _masked(self, site: Site, call: Call, numbers: np.ndarray, layout: Layout, privacy: Any) -> Parcel:
        begun = at_step(site, call.operation, "ready")
        context = begun.context()
        question = digest_of_question(call.parcels, call.arguments)
        note_masked(site, begun, question, numbers)
        key = begun.private_key
        pairs = [
            (pair_secret(key, context.keys[other]), sign_of(site.name, other, context.keys))
            for other in begun.members
            if other != site.name
        ]
        add_masks(numbers, [(bytes.fromhex(begun.own_seed), 1), *pairs], context.info(question))
        keep(site, changed(begun, {"step": "added", "question": question}))
        about = {"id": context.sum_id[:16], "sites": len(begun.members)}
        row = torch.from_numpy(numbers.view(np.int64))
        return Parcel(MASKED, {"numbers": row}, {"layout": layout, "sum": about}, privacy)

    # --- checks and small things ---------------------------------------------------------------------

    def _check_keys(self, site: Site, found: OpenSum, public: Mapping[str, bytes]) -> None:
        if public.get(site.name) != public_key(found.private_key):
            raise ParcelRejected(f"the mask keys that came do not have that of site '{site.name}'")
        pinned = {name: site.keys.public(name) for name in public}
        if len(set(pinned.values())) < len(pinned):
            raise ParcelRejected("two sites of the sum have the same pinned key, and count as one")
        for name in public:
            if pinned[name] is None:
                raise ParcelRejected(f"site '{site.name}' has no key of '{name}', which is said to be in the sum")
            try:
                pair_secret(found.private_key, public[name])
            except ValueError:  # a point at which X25519 is not safe
                raise ParcelRejected(f"the mask key of site '{name}' is none that two sites could share") from None

    def _check_left(self, sites: int, threshold: int) -> None:
        if sites < threshold:
            raise GateRefused(
                f"{sites} sites are left of a secure sum, and {threshold} must be (federation.threshold, and min_sites "
                "and liars of the site's policy)"
            )

    def _split(self, site: Site, found: OpenSum, purpose: str, secret: str) -> list[bytes]:
        def coefficient(number: int) -> int:
            high, low = (draw(site, "coefficient", purpose, found.operation, number, half) for half in (0, 1))
            return int.from_bytes(high + low, "big")

        return split_secret(bytes.fromhex(secret), found.threshold, len(found.keys), coefficient)

    def _box(self, site: Site, found: OpenSum, name: str, of_key: bytes, of_seed: bytes) -> Tensor:
        if name == site.name:  # a place without a box
            return torch.zeros(BOX, dtype=torch.uint8)
        recipient = site.keys.public(name)
        assert recipient is not None, "checked before"
        about = _about(found, site.name, name)
        drawn = X25519PrivateKey.from_private_bytes(draw(site, "box", name, found.operation))
        sender = site.keys.own(site.name)
        return _tensor(seal_box(of_key + of_seed, about, sender=sender, recipient=recipient, drawn=drawn))

    def _open_box(self, site: Site, found: OpenSum, sender: str, box: Tensor) -> bytes:
        key = site.keys.public(sender)
        try:
            if key is None or box.dtype != torch.uint8 or tuple(box.shape) != (BOX,):
                raise SealBroken("it is none")
            about = _about(found, sender, site.name)
            return open_box(box.numpy().tobytes(), about, recipient=site.keys.own(site.name), sender=key)
        except SealBroken as error:
            raise ParcelRejected(
                f"the box of shares of site '{sender}' does not open: {error}, or made for a sum of other keys"
            ) from None


def draw(site: Site, *purpose: str | int) -> bytes:
    """32 secret bytes: from the machine's own source at a deployed site, from the study's seed at a simulated one."""
    if site.secret:
        return secrets.token_bytes(32)
    own = site.keys.own(site.name).private_bytes_raw()
    return hashlib.sha256(b"polyclinic sum 1" + own + json.dumps([site.round, *purpose]).encode()).digest()


def _about(found: OpenSum, sender: str, recipient: str) -> dict[str, Any]:
    """What a box of shares is bound to: the sum with the mask keys of all, as the sender knows them."""
    return {"sum": found.context(of_all=True).sum_id, "from": sender, "to": recipient}


def _key_bytes(name: str, key: Tensor) -> bytes:
    if key.dtype != torch.uint8 or tuple(key.shape) != (KEY_BYTES,):
        raise ParcelRejected(f"what came as the mask key of site '{name}' is none")
    return key.numpy().tobytes()


def _tensor(data: bytes | bytearray) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytes(data), np.uint8).copy())
