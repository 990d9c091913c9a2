"""Key exchange between sites, and sealed parcels: public keys, encryption for one site, decryption.

Every site has the others' public keys on its ring (`ledger/keys.py`): a deployed one in its kit. They go through the
coordinator only to be compared (`KeyExchange`): a key that is not the one on the ring is refused, and so is a site that
is not on it. What a site agreed to is bound into its ledger by `take_keys`. A sealed box is taken once.
"""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from polyclinic.federation.call import Call
from polyclinic.federation.ledger.keys import KEY_BYTES, SealBroken, open_box, public_key, seal_box
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.notes import Notes
from polyclinic.federation.ledger.parcel import SEALED, Parcel, decode
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.json_types import JsonObject

#: where a site's state keeps which boxes it has taken, uint8 [boxes, 32], and the file of a deployed one, with a digest
#: of call and state for each
TAKEN = "boxes taken"
BOXES = "boxes.txt"


class KeyExchange:
    """Two operations that every site has, whatever the method."""

    @operation("keys")
    def give_key(self, site: Site) -> Parcel:
        """The site's public key; its private one stays."""
        return Parcel("keys", {site.name: _tensor(public_key(site.keys.own(site.name)))})

    @operation("keys")
    def take_keys(self, site: Site, keys: Mapping[str, Tensor]) -> Parcel:
        """Compare the public keys of all sites with those on the site's ring; the keys that it agrees to."""
        for name, key in keys.items():
            if key.dtype != torch.uint8 or tuple(key.shape) != (KEY_BYTES,):
                raise ParcelRejected(f"what came as the key of site '{name}' is none")
            if site.keys.public(name) != _bytes(key):
                raise ParcelRejected(f"the key of site '{name}' is not the one that site '{site.name}' has for it")
        return Parcel("keys", keys)


def seal(site: Site, parcel: Parcel, call: Call) -> Parcel:
    """The parcel as it leaves `site` for the site `call.to`: what it holds, for that site only.

    Its kind and what it says of privacy stay readable, for the coordinator's accounts.
    """
    about = {"from": site.name, "operation": call.operation, "kind": parcel.kind}
    key = site.keys.public(call.to)
    if key is None:
        raise ParcelRejected(f"site '{site.name}' has no key of '{call.to}', for whom the parcel is")
    bound = {**about, "to": call.to, "round": call.round, **_run_of(site)}
    box = seal_box(parcel.encoded, bound, sender=site.keys.own(site.name), recipient=key)
    return Parcel(SEALED, {"box": _tensor(box)}, about, parcel.privacy)


def unseal(site: Site, parcel: Parcel, call: Call) -> Parcel:
    """The parcel that another site sealed for this one; ParcelRejected if the box does not open here and now, or was
    taken before."""
    about: JsonObject = {name: parcel.metadata.get(name) for name in ("from", "operation", "kind")}
    key = site.keys.public(str(about["from"]))
    if key is None or set(parcel.tensors) != {"box"}:
        raise ParcelRejected(f"a sealed parcel came from '{about['from']}', of whom site '{site.name}' has no key")
    box = parcel.tensors["box"]
    if box.dtype != torch.uint8 or box.dim() != 1:
        raise ParcelRejected(f"what came sealed from site '{about['from']}' is no box")
    bound = {**about, "to": site.name, "round": call.round, **_run_of(site)}
    try:
        mine = site.keys.own(site.name)
        plain = open_box(box.cpu().contiguous().numpy().data, bound, recipient=mine, sender=key)
    except SealBroken as broken:
        raise ParcelRejected(f"the sealed {about['kind']} of site '{about['from']}' do not open: {broken}") from broken
    _take_once(site, box, str(about["from"]), call)
    found = decode(plain)
    if found.kind != about["kind"]:
        raise ParcelRejected(f"a parcel of kind '{found.kind}' came under the name of '{about['kind']}'")
    return found


def _run_of(site: Site) -> dict[str, str]:
    """The run of a deployed site, so that no box is taken in another run of the same study. The keys of a simulated
    site, which follow from the seed, serve no other run."""
    return {"run": site.place.parent.parent.name} if site.kit else {}


def _take_once(site: Site, box: Tensor, sender: str, call: Call) -> None:
    """ParcelRejected for a box that the site has taken before: twice, a model would count twice. The site's state keeps
    the key that was drawn for each box, by which a box is known.

    A coordinator can put the state back, so a deployed site also keeps a file of boxes, which nobody puts back. A box
    in it is taken again only for the same call in the same state, after an interruption: that gives the same answer.
    """
    drawn = box[:KEY_BYTES].cpu().reshape(1, -1)
    taken = site.state.get(TAKEN, torch.zeros(0, KEY_BYTES, dtype=torch.uint8))
    now = asked_in_state(site, call) if site.secret else ""
    first = Notes.at(site.folder / BOXES).first(_bytes(drawn).hex(), now) if site.secret else ""
    if bool((taken == drawn).all(1).any()) or first != now:
        raise ParcelRejected(f"the sealed parcel from site '{sender}' was taken before")
    site.state[TAKEN] = torch.cat([taken, drawn])


def asked_in_state(site: Site, call: Call) -> str:
    """A digest of a call and of the site's state before it."""
    found = hashlib.blake2b(json.dumps([call.operation, call.round, dict(call.arguments)]).encode(), digest_size=32)
    for name in sorted(site.state):
        found.update(f"{name} {site.state[name].dtype} {tuple(site.state[name].shape)}".encode())
        found.update(site.state[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _tensor(data: bytes | bytearray) -> Tensor:
    """On the memory of a bytearray; bytes are copied, as a tensor could be written to."""
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().numpy().tobytes()
