"""Files that hospitals get: service units, containers, readmes and certificates of kits; bytes that a study moves."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer.main

from polyclinic.cli import run_app
from polyclinic.cli.app import app
from polyclinic.deployment.kits import README_OF_ADMIN, README_OF_SERVER, README_OF_SITE
from polyclinic.deployment.study_in_words import bytes_a_round, traffic_in_words
from polyclinic.study import Study

FOLDER = Path(__file__).parents[2] / "deploy"
UNITS = sorted((FOLDER / "systemd").glob("*.service"))


def command_of(unit: Path) -> list[str]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(unit)
    return shlex.split(parser["Service"]["ExecStart"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_of_a_unit_exists(unit, capsys):
    program, *words = command_of(unit)
    assert program.endswith("/bin/polyclinic")
    assert run_app([*words[:2], "--help"]) == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_nothing_wrong_with_a_unit(unit, tmp_path):
    program = command_of(unit)[0]
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(program, shutil.which("true")))
    said = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    about_it = [line for line in said.stderr.splitlines() if unit.name in line]
    assert about_it == []


def test_the_command_of_the_container_exists(capsys):
    text = (FOLDER / "Dockerfile").read_text()
    words = json.loads(re.search(r"^CMD (\[.*\])$", text, re.M)[1])
    assert run_app([*words[:2], "--help"]) == 0


def services_of(name: str) -> dict[str, dict[str, object]]:
    yaml = pytest.importorskip("yaml", reason="the extra [nvflare] is not installed")
    return yaml.safe_load((FOLDER / f"compose.{name}.yml").read_text())["services"]


@pytest.mark.parametrize("name", ["server", "site", "rehearsal"])
def test_containers_have_no_more_rights_than_they_need(name):
    for service in services_of(name).values():
        assert service["image"] == "polyclinic"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        assert service["tmpfs"] == ["/tmp"]
        assert not {"privileged", "network_mode", "cap_add", "user"} & service.keys()


def test_only_the_server_opens_a_port_and_images_are_read_only():
    (server,), (site,) = services_of("server").values(), services_of("site").values()
    assert server["ports"] == ["8002:8002"]
    assert "ports" not in site
    assert [volume for volume in site["volumes"] if volume.endswith(":/images:ro")]
    assert all("ports" not in service for service in services_of("rehearsal").values())


def test_the_rehearsal_has_the_sites_of_the_tutorial_and_a_command_that_exists(capsys):
    services = services_of("rehearsal")
    study = (FOLDER.parent / "docs" / "tutorials" / "three_hospitals.md").read_text()
    sites = json.loads(re.search(r"^names = (\[.*\])$", study, re.M)[1])
    assert sorted(services) == sorted([*sites, "server", "admin"])
    assert all(services[site]["volumes"] == [f"./deployment/sites/{site}:/kit"] for site in sites)
    assert run_app([*services["admin"]["command"][:2], "--help"]) == 0


@pytest.mark.parametrize("text", [README_OF_SITE, README_OF_SERVER, README_OF_ADMIN], ids=["site", "server", "admin"])
def test_the_commands_exist(text):
    whole = typer.main.get_command(app)
    found = re.findall(r"polyclinic ((?:site|deploy) [a-z-]+|ledger)", text)
    assert found
    for words in found:
        command = whole
        for word in words.split():
            assert word in command.commands, words
            command = command.commands[word]


def test_a_round_moves_the_model_there_and_back():
    study = Study(
        data={"source": "at-sites", "channels": 1, "size": 28},
        sites={"partition": "iid", "names": ["north", "south", "west"]},
        model={"backbone": "lenet5"},
        method={"name": "fedavg", "rounds": 5},
    )
    each = bytes_a_round(study)
    assert each == 4 * (6 * 26 + 16 * (6 * 25 + 1) + 120 * (400 + 1) + 84 * 121 + 2 * 85)
    assert bytes_a_round(study.with_settings({"engine.wire": "int8"})) == each // 4
    assert "in each of 5 rounds" in traffic_in_words(study)
