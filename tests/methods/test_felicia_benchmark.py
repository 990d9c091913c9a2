"""What FELICIA would make of a rare sub-group if all discriminators were perfect."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
from processes import run_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def call(script: str, *options: str) -> subprocess.CompletedProcess:
    done = run_script(BENCHMARKS / script, *options)
    assert done.returncode == 0, done.stderr
    return done


def test_what_perfect_discriminators_would_settle_at():
    import felicia_balance as ideal

    for loss in (ideal.log, ideal.log_as_written):
        assert ideal.balance(loss, 0.02, 0.0) == pytest.approx((0.02, 0.5))  # nobody but one's own images
        shares = [ideal.balance(loss, 0.1, weight)[0] for weight in (0.0, 1.0, 3.0)]
        assert shares == sorted(shares)
        alike = ideal.balance(loss, 0.1, 1000.0)
        assert alike[0] == pytest.approx(alike[1], abs=1e-2)  # with a large lambda sites make the same
    # with the formula as written that is the middle of what both have, where their losses are level
    level = sum(ideal.log_as_written(r, 0.28) - ideal.log_as_written(1 - r, 0.72) for r in (0.1, 0.5))
    assert level == pytest.approx(0.0, abs=0.05)


def test_neither_site_of_a_balance_would_rather_make_another_share():
    """What both pay, written out: all of Eq. 6 as it stands, and what GANs are trained with."""
    import felicia_balance as ideal

    def slope(real: float, made: float, others: float, written: bool) -> float:
        rare, usual = real / (real + made), (1 - real) / (2 - real - made)  # D of an image of either sub-group
        known, usually_known = made / (made + others), (1 - made) / (2 - made - others)  # D_p of its site
        if written:
            return math.log((1 - rare) / (1 - usual)) + 3 * math.log(known / usually_known)
        return -math.log(rare / usual) - 3 * math.log((1 - known) / (1 - usually_known))

    for written, prices in ((True, (ideal.log_as_written, ideal.away)), (False, (ideal.log, ideal.other))):
        first, second = ideal.balance(prices[0], 0.02, 3.0, prices[1])
        assert 0.02 < first < second < 0.5
        assert slope(0.02, first, second, written) == pytest.approx(0.0, abs=0.01)
        assert slope(0.5, second, first, written) == pytest.approx(0.0, abs=0.01)


@pytest.mark.slow
def test_the_balance_ends_in_one_line_of_json(tmp_path):
    done = call("felicia_balance.py", "--quick", "--json", str(tmp_path / "found.json"))
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == json.loads((tmp_path / "found.json").read_text())
    assert [(row["loss"], row["towards"]) for row in printed["rows"]] == [
        *(("log", "other"), ("log", "away"), ("log, as written", "other"), ("log, as written", "away"))
    ]
    assert all(row["made"] == sorted(row["made"]) for row in printed["rows"])
