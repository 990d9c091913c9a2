"""How a call and its answer cross the wire: small ones in one message, large ones in pieces.

Every message is bytes there and bytes back, `pack`ed. Pieces keep memory bounded at both ends, whatever a method sends.

    piece  {call, index} + bytes        a piece of a call that is too large for one message
    run    {call, pieces, position, durable, deadline} + call   work on it; the answer, or `working` after a while
    wait   {call}                       the answer, or `working` after a while
    take   {call, offset}               a piece of an answer that is too large for one message
    ping   {}                           a sign of life; a deployed site adds whether its people let the study run
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

#: bytes of a piece, and of the largest call or answer that travels in one message
PIECE = 8 * 2**20
#: bytes of the largest call or answer that is taken: a parcel has at most 4 GiB (`Expected.max_bytes`)
LARGEST = 4 * 2**30 + 2**24
#: seconds that a site lets the coordinator wait for an answer before it says that it is still working
PATIENCE = 10.0


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
