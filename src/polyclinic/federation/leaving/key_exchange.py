"""Key exchange between sites, and sealed parcels: public keys, encryption for one site, decryption.

Public keys go through the coordinator once (`KeyExchange`). A site takes a key for good: one that changes later is
refused. What a site holds is bound into its ledger by `take_keys`, whose line has the same digest at every site; a
coordinator that swapped a key would leave ledgers that differ there, for anyone who lays two side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyclinic.federation.call import Call
from polyclinic.federation.leaving import sealing
from polyclinic.federation.leaving.parcel import SEALED, Parcel, ParcelRejected, decode
from polyclinic.federation.operation import operation
from polyclinic.json_types import JsonObject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polyclinic.federation.site import Site


class KeyExchange:
    """Two operations that every site has, whatever the method."""

    @operation("keys")
    def give_key(self, site: Site) -> Parcel:
        """The site's public key; its private one is drawn here at first, and stays."""
        return Parcel("keys", {site.name: _tensor(_own_key(site))})

    @operation("keys")
    def take_keys(self, site: Site, keys: Mapping[str, Tensor]) -> Parcel:
        """Keep the public keys of all sites; all that the site holds now."""
        held = site.state.group("keys")
        for name, key in keys.items():
            if key.dtype != torch.uint8 or tuple(key.shape) != (sealing.KEY_BYTES,):
                raise ParcelRejected(f"what came as the key of site '{name}' is none")
            if name in held and not torch.equal(held[name], key):
                raise ParcelRejected(f"the key of site '{name}' is not the one it had; ask that site before you go on")
        if not torch.equal(keys.get(site.name, torch.zeros(0)), _tensor(_own_key(site))):
            raise ParcelRejected("the keys that came hold a false one in this site's own name")
        site.state.put("keys", {**held, **keys})
        return Parcel("keys", site.state.group("keys"))


def seal(site: Site, parcel: Parcel, call: Call) -> Parcel:
    """The parcel as it leaves `site` for the site `call.to`: what it holds, for that site only.

    Its kind and what it says of privacy stay readable, for the coordinator's accounts.
    """
    about = {"from": site.name, "operation": call.operation, "kind": parcel.kind}
    key = site.state.group("keys").get(call.to)
    if key is None:
        raise ParcelRejected(f"site '{site.name}' has no key of site '{call.to}', for which the parcel is")
    bound = {**about, "to": call.to, "round": call.round}
    box = sealing.seal(parcel.encoded, bound, sender=sealing.key_in(site.folder), recipient=_bytes(key))
    return Parcel(SEALED, {"box": _tensor(box)}, about, parcel.privacy)


def unseal(site: Site, parcel: Parcel, call: Call) -> Parcel:
    """The parcel that another site sealed for this one; ParcelRejected if the box does not open here and now."""
    about: JsonObject = {name: parcel.metadata.get(name) for name in ("from", "operation", "kind")}
    key = site.state.group("keys").get(str(about["from"]))
    if key is None or set(parcel.tensors) != {"box"}:
        raise ParcelRejected(f"a sealed parcel came from '{about['from']}', of whom site '{site.name}' has no key")
    box = parcel.tensors["box"]
    if box.dtype != torch.uint8 or box.dim() != 1:
        raise ParcelRejected(f"what came sealed from site '{about['from']}' is no box")
    bound = {**about, "to": site.name, "round": call.round}
    try:
        mine, theirs = sealing.key_in(site.folder), _bytes(key)
        plain = sealing.unseal(box.cpu().contiguous().numpy().data, bound, recipient=mine, sender=theirs)
    except sealing.SealBroken as broken:
        raise ParcelRejected(f"the sealed {about['kind']} of site '{about['from']}' do not open: {broken}") from broken
    found = decode(plain)
    if found.kind != about["kind"]:
        raise ParcelRejected(f"a parcel of kind '{found.kind}' came under the name of '{about['kind']}'")
    return found


def _own_key(site: Site) -> bytes:
    return sealing.public_key(sealing.key_in(site.folder))


def _tensor(data: bytes | bytearray) -> Tensor:
    """On the memory of a bytearray; bytes are copied, as a tensor could be written to."""
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().numpy().tobytes()
