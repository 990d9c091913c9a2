"""The bytes of a parcel and of its header, to the last one; which sentence answers what; when a digest is computed."""

import hashlib
import json
import tracemalloc
import zlib
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from polyclinic.federation.call import Expected, OneOf, Reply
from polyclinic.federation.ledger import digest_threads, parcel, wire
from polyclinic.federation.ledger.digest_threads import Background
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel, decode, decode_all, shortened


def refusal(data, *given, **how) -> str:
    with pytest.raises(ParcelRejected) as refused:
        decode(data, *given, **how)
    return str(refused.value)


def described(**told) -> bytes:
    """A parcel of one tensor that is described like this."""
    return save({"a": torch.zeros(1)}, {"parcel": json.dumps({"kind": "weights", "metadata": {}, **told})})


NOT_LONG_ENOUGH = "the bytes are not a parcel: too short, or the header is too long"


def test_headers_that_are_too_long_or_larger_than_safetensors_writes(monkeypatch):
    data = Parcel("weights", {}).encoded
    size = int.from_bytes(data[:8], "little")
    monkeypatch.setattr(parcel, "HEADER_LIMIT", size)
    assert decode(data).kind == "weights"
    monkeypatch.setattr(parcel, "HEADER_LIMIT", size - 1)
    assert refusal(data) == NOT_LONG_ENOUGH


@pytest.mark.parametrize("told", [{"kind": 3}, {"metadata": []}, {"privacy": [1]}, {"privacy": 1.0}])
def test_a_description_of_other_types(told):
    assert refusal(described(**told)) == "a parcel's kind must be text, its metadata and its privacy tables"
    assert decode(described(privacy={"epsilon": 1.0})).privacy == {"epsilon": 1.0}
    assert decode(described(privacy=None)).privacy is None


@pytest.mark.parametrize("tensors", [
    {},
    {"a": torch.ones(2)},
    {"b": torch.ones(3, 5), "a": torch.arange(3), "c": torch.ones(7, dtype=torch.bfloat16), "d": torch.ones(0, 2)},
])  # fmt: skip
def test_the_header_is_what_safetensors_writes(tensors):
    found = Parcel("weights", tensors).layout
    data = save(tensors, {"of": "é"})
    start = found.header({"of": "é"})
    assert data.startswith(start)
    assert len(data) - len(start) == found.size == sum(tensor.nbytes for tensor in tensors.values())
    made = Parcel("weights", tensors)
    assert made.digest == hashlib.sha256(made.encoded).hexdigest()


def test_norms_and_refusals_of_several_types():
    with torch.inference_mode():
        made = torch.full((4,), 3.0)
    tensors = {"double": torch.full((4,), 1e100, dtype=torch.float64), "half": torch.full((4,), 40000.0).half()}
    found = Parcel("weights", {**tensors, "made": made, "none": torch.zeros(0), "whole": torch.tensor(3)}).norms
    assert found == {"double": 2e100, "half": 80000.0, "made": 6.0}
    small, large = ({"w": torch.zeros(size)} for size in (2, 5))
    either = OneOf("weights", choices=(Expected.like("weights", small), Expected.like("weights", large)))
    for tensors in (small, large):
        either.check(Parcel("weights", tensors))
    with pytest.raises(ParcelRejected, match=r"expected torch.float32 \(2,\)"):
        either.check(Parcel("weights", {"w": torch.zeros(3)}))


def test_the_bytes_are_those_that_safetensors_writes_whatever_the_type():
    rng = torch.Generator().manual_seed(0)
    drawn = {name: torch.randint(0, 2, (3, 1), generator=rng).to(dtype) for dtype, name in parcel.TYPES.items()}
    tensors = {**drawn, "b\u00e9": torch.zeros(()), "a": torch.zeros(0, 2)}
    made = Parcel("weights", tensors, {"of": 'a "\x01\n\\\u00e9'})
    told = json.dumps({"kind": "weights", "metadata": {"of": 'a "\x01\n\\\u00e9'}}, sort_keys=True)
    assert made.encoded == save(tensors, {"parcel": told})
    unknown = Parcel("weights", {"z": torch.zeros(1, dtype=torch.complex128)})
    with pytest.raises(TypeError, match=r"this type have no encoding: 'z' \(torch.complex128\)"):
        _ = unknown.size


IMAGES = torch.arange(4 * 64, dtype=torch.uint8).reshape(4, 1, 8, 8)


def test_what_is_packed_is_not_unpacked_beyond_a_limit(monkeypatch):
    data = Parcel("synthetic-images", {"x": IMAGES}, compressed=("x",)).encoded
    assert torch.equal(decode(data, most=256).tensors["x"], IMAGES)
    assert "above the limit of 255" in refusal(data, most=255)
    assert decode(data).compressed == ("x",)
    # what came counts, and what it becomes: both are in memory at once
    exact = Parcel("weights", {"w": torch.ones(40, 40), "b": torch.ones(3)})
    data = shortened(exact, "int8").encoded
    most = 40 * 40 * 4 + sum(tensor.nbytes for tensor in load(data).values())
    assert decode(data, most=most).tensors["w"].shape == (40, 40)
    assert "6400 bytes are declared, and the limit is 6399" in refusal(data, most=most - 1)
    data = Parcel("synthetic-images", {"x": IMAGES}, compressed=("x",)).encoded
    monkeypatch.setattr(parcel, "MESSAGE_LIMIT", 3 * 256)
    assert len(decode_all([data] * 3)) == 3
    with pytest.raises(ParcelRejected, match="above the limit of 0"):
        decode_all([data] * 4)


def few_bytes(numbers: int) -> bytes:
    """A parcel that declares so many numbers, all equal, in a thousandth of their bytes."""
    raw = np.ones(1, np.float32).tobytes() + bytes(2 * numbers)
    blob = torch.frombuffer(bytearray(zlib.compress(raw)), dtype=torch.uint8)
    of_wire = {"encoding": "fp16", "tensors": {"w": {"dtype": "float32", "shape": [numbers]}}}
    said = json.dumps({"kind": "weights", "metadata": {}, "wire": of_wire})
    return save({"w": blob}, {"parcel": said})


def test_few_bytes_do_not_become_many(monkeypatch):
    """400 kB that would become 800 MB, before anybody knows whether such weights were expected."""
    data = few_bytes(2 * 10**8)
    assert len(data) < 400_000
    tracemalloc.start()
    assert "800000000 bytes are declared" in refusal(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * len(data)
    monkeypatch.setattr(wire, "ROOM", 8 * 10**6)
    assert decode(few_bytes(10**6)).tensors["w"].shape == (10**6,)
    assert "12000000 bytes are declared" in refusal(few_bytes(3 * 10**6))


def test_what_would_become_too_many_bytes_travels_as_it_lies(monkeypatch):
    """Zeros, such as the first control variates; what two ends have already is told by its difference all the same."""
    monkeypatch.setattr(wire, "ROOM", 10**5)
    mixed = {"zeros": torch.zeros(10**6), "w": torch.randn(1000, 100)}
    for encoding in ("fp16", "int8"):
        sent = shortened(Parcel("gradients", mixed), encoding)
        assert len(sent.encoded) > 4 * 10**6
        assert torch.equal(decode(sent.encoded).tensors["zeros"], mixed["zeros"])
    weights = Parcel("weights", mixed)
    same = shortened(weights, "delta", mixed)
    assert len(same.encoded) < 10**5
    assert torch.equal(decode(same.encoded, base=mixed).tensors["w"], mixed["w"])
    black = Parcel("synthetic-images", {"x": torch.zeros(100, 1, 64, 64, dtype=torch.uint8)}, compressed=("x",))
    assert len(black.encoded) > 400_000
    assert torch.equal(decode(black.encoded).tensors["x"], black.tensors["x"])


def test_what_is_not_shortened_is_the_same_and_what_came_counts():
    large, small = Parcel("weights", {"w": torch.rand(40, 40)}), Parcel("weights", {"w": torch.rand(4)})
    assert shortened(large, "exact") is large
    assert shortened(small, "int8") is small
    assert shortened(large, "delta") is large  # nothing that both ends have
    assert shortened(large, "delta", {"w": torch.zeros(40, 40)}) is not large
    scores = Parcel("metrics", large.tensors)
    assert shortened(scores, "fp16") is scores
    once = shortened(large, "fp16")
    assert shortened(once, "int8") is once
    assert (large.wire, once.wire, decode(once.encoded).wire) == ("exact", "fp16", "fp16")
    # Another sender may write the same header with other spaces; its bytes are those that left.
    data = Parcel("weights", {"w": torch.arange(3.0)}, {"samples": 3}).encoded
    size = int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8 : 8 + size])).encode()
    other = len(text).to_bytes(8, "little") + text + data[8 + size :]
    assert other != data
    for came in (data, other):
        found = decode(came)
        assert (found.encoded, found.size, found.digest) == (came, len(came), hashlib.sha256(came).hexdigest())
    # 20 MB of metadata would be a gigabyte of Python's objects.
    many = "[" + "[]," * 10**7 + "[]]"
    header = json.dumps({"__metadata__": {"parcel": f'{{"kind": "weights", "metadata": {{"x": {many}}}}}'}}).encode()
    message = f'{{"lengths": [], "header": {{"site": "north", "head": {many}}}}}'.encode()
    header, message = (len(one).to_bytes(8, "little") + one for one in (header, message))
    tracemalloc.start()
    assert refusal(header) == NOT_LONG_ENOUGH
    with pytest.raises(ParcelRejected, match="above the limit"):
        Reply.from_bytes(message)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


@pytest.mark.parametrize("encoding", ["fp16", "int8", "delta"])
def test_the_digest_of_a_shortened_parcel_is_of_the_numbers_that_come_and_not_of_what_travels(encoding):
    exact = Parcel("weights", {"w": torch.arange(1600.0).reshape(40, 40)}, {"samples": 3}, {"epsilon": 1.0})
    made = shortened(exact, encoding, {"w": torch.ones(40, 40)})
    assert made.digest_of_bytes == hashlib.sha256(made.encoded).hexdigest() != made.digest
    assert decode(made.encoded, base={"w": torch.ones(40, 40)}).digest == made.digest


class Waited(Future):
    """Ends when somebody waits for it."""

    def exception(self, timeout=None):
        if not self.done():
            self.set_result("waited")
        return super().exception(timeout)


@pytest.mark.parametrize(("bytes", "waits"), [(60, False), (64, True)])
def test_who_adds_more_than_may_wait_waits_for_the_first(monkeypatch, bytes, waits):
    monkeypatch.setattr(digest_threads, "MOST_WAITING", 100)
    held, first, second = Background(1), Waited(), Waited()
    held._waiting.extend([(first, 30), (second, 10)])
    held.submit(lambda: None, [torch.zeros(bytes // 4)]).result()
    assert (first.done(), second.done()) == (waits, False)
    assert len(held._waiting) == (2 if waits else 3)
    held.settle()
    assert second.done()
    assert not held._waiting
