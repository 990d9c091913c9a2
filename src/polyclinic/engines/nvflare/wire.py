"""How a call and its answer cross the wire: small ones in one message, large ones in pieces.

Every message is bytes there and bytes back, `pack`ed. Pieces keep memory bounded at both ends, whatever a method sends.

    piece  {call, index} + bytes        a piece of a call that is too large for one message
    run    {call, pieces, held, position, durable, deadline} + call   work on it; the answer, or `working` after a
                                        while, or `missing` where the site no longer has what `held` names
    wait   {call}                       the answer, or `working` after a while
    take   {call, offset}               a piece of an answer that is too large for one message
    ping   {}                           a sign of life; a deployed site adds whether its people let the study run
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

from polyclinic.federation.call import frame_of

#: bytes of a piece, and of the largest call or answer that travels in one message
PIECE = 8 * 2**20
#: bytes of the largest call or answer that is taken: a parcel has at most 4 GiB (`Expected.max_bytes`)
LARGEST = 4 * 2**30 + 2**24
#: seconds that a site lets the coordinator wait for an answer before it says that it is still working
PATIENCE = 10.0


#: bytes of the smallest parcel that a site keeps, so that it need not travel again
KEPT_FROM = 4096


class Kept:
    """What a site keeps of the last call: its large parcels, by digest, for the calls that come with them again."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def whole(self, call: bytes, held: Mapping[str, str]) -> bytes | None:
        """The bytes of a call, with the parcels that did not travel; None if one of them is not here.

        `held`: digests by the parcel's place in the call. What is whole is kept for the next call.
        """
        start, lengths = frame_of(call)
        if start + sum(lengths) > LARGEST:
            raise ValueError(f"a call has at most {LARGEST} bytes, with what did not travel")
        places = {int(place): digest for place, digest in held.items()}
        parts, at = [call[:start]], start
        for place, length in enumerate(lengths):
            blob = self._blobs.get(places[place]) if place in places else call[at : at + length]
            if blob is None or len(blob) != length:
                return None
            at += 0 if place in places else length
            parts.append(blob)
        if at != len(call):
            raise ValueError("a call is not as long as its header says")
        if large := [blob for blob in parts[1:] if len(blob) >= KEPT_FROM]:
            self._blobs = {hashlib.sha256(blob).hexdigest(): blob for blob in large}
        return b"".join(parts)


def pieces(buffers: Iterable[bytes], size: int = PIECE) -> Iterator[bytes]:
    """The bytes of all buffers one after the other, cut into pieces; only one piece is made at a time."""
    begun = bytearray()
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            taken = view[: size - len(begun)]
            begun += taken
            view = view[len(taken) :]
            if len(begun) == size:
                yield bytes(begun)
                begun.clear()
    if begun:
        yield bytes(begun)
