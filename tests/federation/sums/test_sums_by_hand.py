"""Small rules of sums, each by hand: what fits, what a row says, who signed, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from company import Adding, Company
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.sums import arithmetic, site_sums
from polyclinic.federation.sums.coordinator_sums import CoordinatorSums
from polyclinic.federation.sums.settings import Federated, Floor
from polyclinic.federation.sums.site_memory import honest_sites, known

NAMES = tuple("abcdefghi")
INTEGER, SECURE = Federated(sum="integer"), Federated(sum="secure")


def test_counts_and_tensors_that_do_not_fit_are_named():
    assert arithmetic.count_to_whole(2.5, 1) == 5
    assert arithmetic.count_to_whole(2**52, 1) == 2**53
    for count in (2**52 + 1, -1):
        with pytest.raises(arithmetic.TooLarge, match=r"images, and up to 4\.504e\+15 fit$"):
            arithmetic.count_to_whole(count, 1)
    parcel = Parcel("weights", {"v": torch.zeros(1), "w": torch.tensor([1e30])}, {"samples": 1})
    with pytest.raises(arithmetic.TooLarge, match=r"^weights 'w' holds 1e"):
        arithmetic.row_of([parcel], mean=True, weighting="samples", bits=24)
    assert collected(INTEGER, [""] * 1024) == []
    with pytest.raises(WorkFailed, match="takes up to 1,024 sites, and there are 1,025"):
        collected(INTEGER, [""] * 1025)


@pytest.mark.parametrize(
    ("threshold", "fewest"),
    [(2 / 3, {1: 1, 2: 2, 3: 3, 4: 3, 6: 5, 9: 7, 12: 9}), (0.5, {2: 2, 3: 2, 4: 3, 10: 6}), (0.7, {10: 8, 20: 15})],
)
def test_more_than_a_share_of_the_sites_opens_a_sum(threshold, fewest):
    """0.7 times 10 is 7.000000000000001 or 6.9999999: neither is rounding away from 8 sites."""
    settings = Federated(sum="secure", threshold=threshold)
    assert {sites: settings.fewest_of(sites) for sites in fewest} == fewest


def test_a_row_has_the_numbers_then_the_weight_the_images_and_one():
    parcels = [
        Parcel("weights", {"w": torch.tensor([0.5, -1.0]), "n": torch.tensor(3)}, {"samples": 2}),
        Parcel("gradients", {"g": torch.tensor([[0.25]])}, {"expected": 1.5}),
    ]
    numbers, layout = arithmetic.row_of(parcels, mean=True, weighting="samples", bits=8)
    assert numbers.view(np.int64).tolist() == [6, 256, -512, 128, 2, 384, 1]
    assert layout == [
        ["weights", "n", "int64", []],
        ["weights", "w", "float32", [2]],
        ["gradients", "g", "float32", [1, 1]],
    ]
    uniform = arithmetic.row_of(parcels, mean=True, weighting="uniform", bits=8)[0].view(np.int64)
    assert uniform.tolist() == [3 * 1024, 512 * 256, -1024 * 256, 256 * 256, 1024, 384, 1]
    assert arithmetic.row_of(parcels, mean=False, weighting="samples", bits=8)[0].view(np.int64).tolist()[-3:] == [
        1,
        384,
        1,
    ]


@pytest.mark.parametrize(("layout", "numbers", "right"), [
    ([["weights", "w", "float32", [2, 3]]], torch.zeros(9, dtype=torch.int64), True),
    ([], torch.zeros(3, dtype=torch.int64), True),
    ([["weights", "w", "float32", [2, 3]]], torch.zeros(8, dtype=torch.int64), False),
    ([["weights", "w", "float32", [2, 3]]], torch.zeros(10, dtype=torch.int64), False),
    ([["weights", "w", "float32", [2, 3]]], torch.zeros(9), False),
    ([["weights", "w", "float32", [2, 3]]], torch.zeros(9, 1, dtype=torch.int64), False),
    ([["weights", "w", "float32", [2**40, 2**40]]], torch.zeros(3, dtype=torch.int64), False),
])  # fmt: skip
def test_a_row_is_as_long_as_its_layout_says(layout, numbers, right):
    if right:
        arithmetic.check_layout(layout, numbers, ["weights"])
        return
    with pytest.raises(ParcelRejected, match=r"a summand of .* whole numbers was expected"):
        arithmetic.check_layout(layout, numbers, ["weights"])


class Two(Adding):
    SUMMED: ClassVar = {**Adding.SUMMED, "both": "sum"}

    @operation("weights", "statistics")
    def both(self, site): ...

    @operation("metrics")
    def evaluate(self, site): ...


def sums(settings=INTEGER):
    return CoordinatorSums(settings, "run", Two(), Two.SUMMED)


def row(kind, values, tail=(1, 0, 1), layout=True):
    numbers = torch.tensor([*values, *tail])
    entries = [[kind, kind[0], "float32", [len(values)]]]
    return Parcel(kind, {"numbers": numbers}, {"layout": entries if layout is True else layout})


@pytest.mark.parametrize(("parcels", "words"), [
    ((), "parcels of no kind came, and weights, statistics were asked"),
    ((row("weights", [1]),), "parcels of weights came, and weights, statistics were asked"),
    ((row("weights", [1]), row("weights", [1])), "parcels of weights, weights came"),
    ((row("weights", [1]), Parcel("statistics", {"s": torch.ones(1)})), "a summand holds 'numbers', and"),
    ((row("weights", [1], layout=None), row("statistics", [1])), "layout is no list"),
    ((row("weights", [2**60]), row("statistics", [1])), "numbers beyond 2\\^53"),
    ((row("weights", [1], (1, 0, 2)), row("statistics", [1])), "does not count as one site"),
    ((row("weights", [1]), row("statistics", [1], layout=[["weights", "w", "float32", [1]]])), "layout is no list"),
])  # fmt: skip
def test_a_reply_that_is_no_row_is_refused(parcels, words):
    call = Call("a", "both", 1)
    sums().check(call, Reply("a", (row("statistics", [1]), row("weights", [2**53]))))
    with pytest.raises(ParcelRejected, match=words):
        sums().check(call, Reply("a", parcels))


def collected(settings, sites, replies=()):
    federation = SimpleNamespace(note_failures=lambda failures: None)
    return list(sums(settings).collect(federation, "both", sites, {}, {}, lambda some: iter(replies)))


def test_rows_are_added_up_by_kind_in_the_form_that_most_sent():
    """Of two sites, with 24 bits: 1 and 2 make 3, and 4 and 5 make 9."""
    one, replies = 2**24, []
    for site, (w, s) in zip("ab", ((1, 4), (2, 5)), strict=True):
        replies.append(Reply(site, (row("weights", [w * one, 0]), row("statistics", [s * one]))))
    [total] = collected(INTEGER, ["a", "b"], replies)
    assert total.site == "all sites"
    assert total.weights["w"].tolist() == [3.0, 0.0]
    assert total.statistics["s"].tolist() == [9.0]
    assert total.metadata["sites"] == 2
    with pytest.raises(WorkFailed, match=r"the sum of 'both' over 1 sites cannot be used: the sum is not that of"):
        collected(INTEGER, ["a"], [Reply("a", (row("weights", [1], (1, 0, 2)), row("statistics", [1])))])
    failed = []
    federation = SimpleNamespace(note_failures=lambda failures: failed.append([one.site for one in failures]))

    def added(*widths):
        sent = [Reply(site, (row("weights", [5] * width),)) for site, width in zip("abcde", widths, strict=False)]
        total = CoordinatorSums(INTEGER, "run", None, {})._added(federation, "both", iter(sent))
        return total.answered, failed.pop(), total.row.tolist()

    assert added() == ([], [], [])
    assert added(1, 2, 2, 1) == (["a", "d"], ["b", "c"], [10, 2, 0, 2])
    assert added(1, 2, 2, 1, 2) == (["b", "c", "e"], ["a", "d"], [15, 15, 3, 0, 3])


def secure(tmp_path, liars, said):
    settings = Federated(sum="secure", threshold=0.8, liars=said)
    some = Company(tmp_path, dict.fromkeys(NAMES, torch.tensor(1.0)), settings)
    some.sums.floor = Floor(3, liars)
    some.broken = {(name, "answer") for name in NAMES}
    with pytest.raises(WorkFailed):
        some.total(2)
    return some.sites["a"]


@pytest.mark.parametrize(("liars", "said", "honest"), [(2, 2, 6), (1, 2, 6), (0, 0, 8), (0, 7, 1), (2, 1, 0)])
def test_noise_is_shared_by_who_is_left_without_the_liars_of_the_study(tmp_path, liars, said, honest):
    """Of nine sites eight must be left. A policy that expects more liars than the study says cannot share noise."""
    site = secure(tmp_path, liars, said)
    assert (known(site).threshold, known(site).honest) == (8, honest)
    if honest:
        assert honest_sites(site) == honest
    else:
        with pytest.raises(ParcelRejected, match=r"more lying sites than federation\.liars.*raise federation\.liars"):
            honest_sites(site)
    site.round = 2
    with pytest.raises(ParcelRejected, match="none has begun"):
        honest_sites(site)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(31, dtype=torch.uint8), torch.zeros(32), torch.zeros(1, 32, dtype=torch.uint8)]
)
def test_a_mask_key_has_32_bytes(wrong):
    assert site_sums._key_bytes("a", torch.arange(32, dtype=torch.uint8)) == bytes(range(32))
    with pytest.raises(ParcelRejected, match="what came as the mask key of site 'a' is none"):
        site_sums._key_bytes("a", wrong)


@pytest.mark.parametrize("change", ["length", "dtype", "a bit", "from itself", "from nobody"])
def test_a_box_of_shares_that_does_not_open_is_refused(tmp_path, change):
    some = Company(tmp_path, dict.fromkeys(NAMES[:4], torch.tensor(1.0)), SECURE)

    def lie(call):
        if (call.site, call.operation) != ("a", "take_shares"):
            return call
        boxes = {name: box.clone() for name, box in call.parcels["shares"].tensors.items()}
        if change == "length":
            boxes["b"] = boxes["b"][:-1]
        elif change == "dtype":
            boxes["b"] = boxes["b"].float()
        elif change == "a bit":
            boxes["b"][7] ^= 1
        else:
            boxes["a" if change == "from itself" else "z"] = boxes["b"]
        return replace(call, parcels={"shares": Parcel("shares", boxes)})

    some.lie = lie
    some.total(2)  # three of four are enough
    words = (
        "came, which gave no key for this sum"
        if change.startswith("from")
        else "the box of shares of site 'b' does not"
    )
    assert [reason for reason in some.refusals() if words in reason]


def test_masks_are_key_streams_that_hang_on_what_was_agreed():
    key = HKDF(SHA256(), length=32, salt=None, info=b"info").derive(b"secret")
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * 3))
    mask = np.frombuffer(stream, "<u8")
    for sign, expected in ((1, 7 + mask), (-1, 7 - mask)):
        numbers = np.full(3, 7, dtype=np.uint64)
        arithmetic.add_masks(numbers, [(b"secret", sign)], b"info")
        assert numbers.tolist() == expected.tolist()
    keys = dict.fromkeys("abc", b"")
    assert [arithmetic.sign_of(*pair, keys) for pair in ("ab", "ba", "ac", "cb")] == [1, -1, 1, -1]
    context = arithmetic.Context("run", 1, "answer", {"a": b"1", "b": b"2"}, ["b", "a"])
    same = arithmetic.Context("run", 1, "answer", {"b": b"2", "a": b"1"}, ["a", "b"])
    assert context.sum_id == same.sum_id
    others = [
        replace(context, run="other"),
        replace(context, round=2),
        replace(context, operation="other"),
        replace(context, keys={"a": b"1", "b": b"3"}),
        replace(context, members=["a"]),
    ]
    assert len({context.sum_id, *(one.sum_id for one in others)}) == 6
    assert context.info("q") != context.info("r")
