"""Which releases an audit takes first."""

from types import SimpleNamespace

from polyclinic.audits.parcels import by_expected_leak


def releases(kind: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(kinds=(kind,), round=number) for number in (1, 4, 7, 10)]


def test_of_updates_the_first_and_then_the_last_are_attacked():
    assert [one.round for one in by_expected_leak(releases("weights"))] == [1, 10, 7, 4]


def test_of_a_generator_the_last_ones_are_attacked():
    assert [one.round for one in by_expected_leak(releases("generator"))] == [10, 7, 4, 1]


def test_one_release_is_enough():
    assert [one.round for one in by_expected_leak(releases("weights")[:1])] == [1]
