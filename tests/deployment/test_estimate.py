"""What is told before a study begins: how many bytes each site will move."""

import datetime

import pytest

from polyclinic.deployment.study_in_words import bytes_a_round, traffic_in_words
from polyclinic.study import Study


def study(method="fedavg", wire="exact"):
    return Study(
        data={"source": "at-sites", "channels": 1, "size": 28},
        sites={"partition": "iid", "names": ["north", "south", "west"]},
        model={"backbone": "lenet5"},
        method={"name": method, "rounds": 5},
        engine={"name": "nvflare", "wire": wire},
    )


def test_a_round_moves_the_model_there_and_back():
    each = bytes_a_round(study())
    assert each == 4 * (6 * 26 + 16 * (6 * 25 + 1) + 120 * (400 + 1) + 84 * 121 + 2 * 85)
    assert traffic_in_words(study()).startswith("each site receives and sends about ")
    assert "in each of 5 rounds" in traffic_in_words(study())


def test_rounded_numbers_are_fewer_bytes():
    assert bytes_a_round(study(wire="int8")) == bytes_a_round(study()) // 4


def test_a_certificate_is_valid_at_a_site_whose_clock_is_an_hour_behind(tmp_path):
    pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
    from cryptography import x509

    from polyclinic.deployment.kits import _provision

    _provision(tmp_path, ("north",), "localhost", 8002)
    files = [tmp_path / "server" / "startup" / "server.crt", tmp_path / "sites" / "north" / "startup" / "rootCA.pem"]
    behind = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    for file in files:
        assert x509.load_pem_x509_certificate(file.read_bytes()).not_valid_before_utc < behind
