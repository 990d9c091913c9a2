"""Numbers that site and coordinator, or a page and the code, must agree about. Another number is another protocol."""

import math
import re
from pathlib import Path

from polyclinic.federation.arriving import course, inspection, orders, replies, units
from polyclinic.federation.arriving.settings import Incoming
from polyclinic.federation.leaving import background, image_codec, ledger, parcel, score_course, sealing, wire_codec
from polyclinic.federation.leaving.policy import DEFAULT_KINDS
from polyclinic.federation.summing import agreement, fixed_point, floor, shamir, site_sums, summand
from polyclinic.federation.summing.settings import MOST_SITES

PAGE = (Path(__file__).parents[2] / "docs" / "incoming.md").read_text(encoding="utf-8")


def test_limits_of_the_incoming_check_are_those_of_its_page():
    rows = re.findall(
        r"^\| `(\w+)`(?:, `\w+`)? \|.*\| ([\d.e]+)[^|]*\| (?:is reported|suspends) \|$", PAGE, re.MULTILINE
    )
    assert [name for name, _ in rows] == ["largest", "empty", "alike", "moved"]
    assert {name: float(limit) for name, limit in rows} == {name: getattr(Incoming(), name) for name, _ in rows}
    assert "or 8 times as far" in PAGE
    assert Incoming().times_own == 8
    assert "up to 4 of them" in " ".join(PAGE.split())
    assert Incoming().at_once == 4


def test_what_the_check_looks_at():
    assert (course.LEAST, course.OTHER_LAYERS) == (0.1, 0.25)
    assert (inspection.FEWEST_IMAGES, units.FEWEST, units.ENOUGH_IMAGES) == (4, 4, 16)
    assert (units.SATURATED, units.FARTHEST) == (3.0, 3.0)
    assert (orders.PARALLEL, orders.FEWEST_ROWS, orders.SHORTEST_ROW) == (0.999, 4, 8)
    assert (units.QUIET, units.SAME, units.TIMES_GRADED) == (0.125, 0.99, 1.5)
    assert (course.LONGEST_STEP, inspection.EXPLODED) == (0.11, 10.0)
    assert (Incoming().images, Incoming().returns) == (32, 3)


def test_what_a_coordinator_believes():
    assert replies.COUNTS == {"samples": 100_000_000, "steps": 1_000_000, "expected": 100_000_000}
    assert (replies.LARGEST_GROWTH, replies.SMALL) == (1000.0, 0.1)


def test_what_a_message_may_be():
    assert (parcel.HEADER_LIMIT, parcel.MESSAGE_LIMIT) == (16_777_216, 4_294_967_296)
    assert (wire_codec.SMALLEST, wire_codec.MOST, wire_codec.LARGEST) == (1024, 1_099_511_627_776, 1e38)
    assert (image_codec.LONGEST, image_codec.PREFIX) == (16_383, 4)
    assert ledger.GENESIS == 64 * "0"
    assert background.PAYS_FROM < background.MOST_WAITING


def test_what_is_asked_how_often():
    assert (score_course.ALL_REPEATS, score_course.LEFT_OUT, score_course.REPEATS) == (12, 3, 2)


def test_what_does_not_leave_unless_a_site_allows_it():
    assert not {"real-images", "labels", "masks"} & set(DEFAULT_KINDS)
    assert {"weights", "gradients", "metrics", "synthetic-images"} <= set(DEFAULT_KINDS)


def test_sizes_of_keys_shares_and_boxes():
    assert (sealing.KEY_BYTES, sealing.OVERHEAD, len(sealing.NONCE)) == (32, 48, 12)
    assert (shamir.SECRET_BYTES, shamir.SHARE_BYTES, agreement.SIGNATURE_BYTES) == (32, 33, 64)
    assert (site_sums.TWO_SHARES, site_sums.BOX) == (66, 66 + 48)


def test_shares_are_numbers_of_a_prime_field_that_holds_every_secret():
    assert all(pow(base, shamir.PRIME - 1, shamir.PRIME) == 1 for base in (2, 3, 5, 7, 11))
    assert 2**256 < shamir.PRIME < 2 ** (8 * shamir.SHARE_BYTES)


def test_whole_numbers_of_a_sum():
    assert fixed_point.LARGEST == 2**53 == int(float(2**53 - 1)) + 1  # the last that a float holds exactly
    assert (summand.UNIFORM, summand.TAIL, summand.COUNT_BITS) == (1024, 3, 24)
    assert (floor.FEWEST, MOST_SITES) == (3, 1024)
    assert math.log2(500e6 * 2**summand.COUNT_BITS) < 53
