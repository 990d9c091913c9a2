"""The readme of a kit is ours: it names commands and files that there are."""

from __future__ import annotations

import re

import pytest
import typer.main

from polyclinic import __version__
from polyclinic.cli.app import app
from polyclinic.deployment.kits import README_OF_ADMIN, README_OF_SERVER, README_OF_SITE, write_readmes


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployment")
    for kit in ("server", "admin", "sites/graz"):
        (folder / kit / "startup").mkdir(parents=True)
        (folder / kit / "readme.txt").write_text("Run start.sh to start the client.")
    (folder / "admin" / "startup" / "readme.txt").write_text("fl_admin.sh")
    write_readmes(folder, ("graz",), "fl.example.org:8002")
    return folder


def test_every_kit_has_ours_and_none_of_nvflares(deployment):
    assert not [file for file in deployment.rglob("*.txt") if file.name == "readme.txt"]
    for kit in ("server", "admin", "sites/graz"):
        text = (deployment / kit / "README.txt").read_text()
        assert "{" not in text
        assert "private key" in text.lower()
        assert max(map(len, text.splitlines())) <= 100


def test_a_sites_readme_names_the_site_the_server_and_the_version(deployment):
    text = (deployment / "sites" / "graz" / "README.txt").read_text()
    assert "'graz'" in text
    assert "fl.example.org:8002" in text
    assert f"polyclinic[nvflare,segmentation]=={__version__}" in text


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
