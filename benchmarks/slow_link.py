"""A slow link: calls and answers through a TCP proxy with little room, long ways, losses and breaks.

    python benchmarks/slow_link.py [--quick] [--megabytes N] [--rate BYTES] [--delay S] [--loss SHARE] [--breaks SHARE]
                                   [--json FILE]

Both ends of the wire of deployed sites (`polyclinic.engines.nvflare`) talk over real sockets, without NVFlare between
them. The proxy lets `--rate` bytes a second through in each direction, later by `--delay` seconds. A share `--loss` of
its blocks of 64 kB is lost and sent again by TCP, which takes three delays more; at a share `--breaks` the connection
breaks. Then the piece that was under way is sent again, and nothing is done twice. The second call has the
same weights, which the site has: they do not travel.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from polyclinic.engines.nvflare import engine as coordinators_end
from polyclinic.engines.nvflare import relay as sites_end
from polyclinic.engines.nvflare.engine import NVFlare, Patience
from polyclinic.engines.nvflare.relay import Relay
from polyclinic.engines.nvflare.wire import pieces
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.parcel import Parcel, shortened
from polyclinic.federation.site import SitePosition

BLOCK = 1 << 16


class Proxy(threading.Thread):
    """A TCP proxy on loopback, in a thread of its own."""

    def __init__(self, target: int, link: argparse.Namespace, seed: int = 0) -> None:
        super().__init__(daemon=True)
        self.target, self.rate, self.delay = target, link.rate, link.delay
        self.loss, self.break_share = link.loss, link.breaks
        self.draw, self.breaks, self.lost, self.bytes = random.Random(seed), 0, 0, 0
        self.port, self._ready, self._loop = 0, threading.Event(), asyncio.new_event_loop()

    def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # it is stopped
            self._loop.run_until_complete(self._serve())

    def open(self) -> int:
        self.start()
        self._ready.wait(10)
        return self.port

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self.join(5)

    async def _end(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
        ways = [self._carry(reader, there_writer), self._carry(there_reader, writer)]
        both = [asyncio.ensure_future(way) for way in ways]
        with contextlib.suppress(asyncio.CancelledError):  # it is stopped
            await asyncio.wait(both, return_when="FIRST_COMPLETED")
        for one in both:
            one.cancel()
        for end in (writer, there_writer):
            end.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry blocks one way; ends where the other side has ended, or the connection breaks."""
        while block := await reader.read(BLOCK):
            await asyncio.sleep(len(block) / self.rate)
            if self.draw.random() < self.loss * len(block) / BLOCK:
                self.lost += 1
                await asyncio.sleep(3 * self.delay + len(block) / self.rate)
            if self.draw.random() < self.break_share * len(block) / BLOCK:
                self.breaks += 1
                return
            self.bytes += len(block)
            asyncio.get_running_loop().call_later(self.delay, _write, writer, block)
        await asyncio.sleep(self.delay)


def _write(writer: asyncio.StreamWriter, block: bytes) -> None:
    if not writer.is_closing():
        writer.write(block)


class Echo:
    """A site's child process: sends back what it was sent, as `engine.wire` says."""

    def __init__(self, encoding: Any) -> None:
        self.encoding, self.calls = encoding, 0

    def restore(self, positions: Any) -> None: ...

    def exchange_call(self, data: bytes, deadline: float | None, durable: Any = None) -> tuple[dict[str, Any], bytes]:
        self.calls += 1
        call = Call.from_bytes(data)
        sent = tuple(shortened(parcel, self.encoding) for parcel in call.parcels.values())
        return {"failed": None, "position": list(SitePosition())}, Reply(call.site, sent).to_bytes()

    def kill(self) -> None: ...


def serve(relay: Relay) -> int:
    """Answer the messages of all connections, one after the other on each; the port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while message := _receive(connection):
                what, _, payload = message.partition(b"\0")
                _deliver(connection, relay.handle(what.decode(), payload))

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listening.getsockname()[1]


def _deliver(connection: socket.socket, message: bytes) -> None:
    connection.sendall(struct.pack("<Q", len(message)) + message)


def _receive(connection: socket.socket) -> bytes:
    """One message; nothing at the end of the connection."""
    head = connection.recv(8, socket.MSG_WAITALL)
    if len(head) < 8:
        return b""
    size = struct.unpack("<Q", head)[0]
    found = bytearray()
    while len(found) < size:
        block = connection.recv(min(1 << 20, size - len(found)))
        if not block:
            return b""
        found += block
    return bytes(found)


class Sender:
    """Sends messages over one connection at a time; one that broke is a message without an answer."""

    def __init__(self, port: int) -> None:
        self.port, self.again = port, 0
        self._connection: socket.socket | None = None

    def __call__(self, what: str, payload: bytes, timeout: float) -> bytes:
        try:
            if self._connection is None:
                self._connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
            _deliver(self._connection, what.encode() + b"\0" + payload)
            if answer := _receive(self._connection):
                return answer
        except OSError:
            pass
        if self._connection is not None:
            self._connection.close()
        self._connection, self.again = None, self.again + 1
        raise TimeoutError("the connection broke")


def measured(chosen: argparse.Namespace, encoding: Any) -> dict[str, Any]:
    """Send weights to a site and back, then ask for the same weights again."""
    torch.manual_seed(0)
    weights = shortened(Parcel("weights", {"w": torch.randn(int(chosen.megabytes * 250), 1000)}), encoding)
    worker = Echo(encoding)
    proxy = Proxy(serve(Relay("north", lambda: worker)), chosen)
    sender = Sender(proxy.open())
    engine = NVFlare({"north": sender}, patience=Patience(None, 3600.0), simulation=False, durable=lambda: None)
    found: dict[str, Any] = {"encoding": encoding, "encoded": weights.size}
    for name in ("first", "again"):
        before, started = proxy.bytes, time.monotonic()
        [reply] = engine.call([Call("north", "train", 1, {"weights": weights})])
        same = bool(reply) and torch.equal(reply.weights["w"], weights.tensors["w"])
        found[name] = {"seconds": time.monotonic() - started, "bytes": proxy.bytes - before, "same": same}
    proxy.stop()
    link = {"breaks": proxy.breaks, "blocks_lost": proxy.lost}
    return found | link | {"sent_again": sender.again, "calls_done": worker.calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="half a megabyte over a faster link")
    parser.add_argument("--megabytes", type=float, default=10.0, help="of weights")
    parser.add_argument("--rate", type=float, default=1e6, help="bytes a second, in each direction")
    parser.add_argument("--delay", type=float, default=0.3, help="seconds")
    parser.add_argument("--loss", type=float, default=0.02, help="share of blocks that TCP must send again")
    parser.add_argument("--breaks", type=float, default=0.002, help="share of blocks at which the connection breaks")
    parser.add_argument("--piece", type=int, default=coordinators_end.PIECE, help="bytes of a piece")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.megabytes, chosen.rate, chosen.delay, chosen.piece = 0.5, 5e6, 0.02, 1 << 17
    for end in (coordinators_end, sites_end):
        end.PIECE = chosen.piece  # type: ignore[attr-defined]
    cut: Callable[..., Any] = lambda buffers: pieces(buffers, chosen.piece)  # noqa: E731
    coordinators_end.pieces = cut
    found = {
        "rate": chosen.rate,
        "delay": chosen.delay,
        "loss": chosen.loss,
        "breaks": chosen.breaks,
        "piece": chosen.piece,
        "runs": [measured(chosen, encoding) for encoding in ("exact", "fp16")],
    }
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
