"""Approval over real NVFlare: a person at one site approves and revokes; a site is revoked at the server."""

import json
import re
import socket
import ssl
import stat

import psutil
import pytest
from processes import free_port, polyclinic, start_polyclinic, wait_for

from polyclinic.deployment.processes import Rehearsal

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture
def deployment(tiny, tmp_path):
    """Three sites, of which a person at site-1 must approve."""
    study = tiny("fedavg", {"engine.quorum": 0.3}, rounds=200, local_steps=60)  # a second or so a round
    (tmp_path / "study.toml").write_text(study.to_toml())
    folder = tmp_path / "deployment"
    polyclinic("deploy", "init", tmp_path / "study.toml", "--out", folder, "--port", free_port())
    policy = folder / "sites" / "site-1" / "local" / "policy.toml"
    policy.write_text(policy.read_text().replace("every = true", "every = false"))
    try:
        told = polyclinic("deploy", "up", "--here", "-d", folder)
        assert "a rehearsal: site-2, site-3 allow more than the kits of real sites do" in told
        assert "They approve every study by themselves" in told
        yield folder
    finally:
        polyclinic("deploy", "down", "-d", folder)


def rounds(deployment):
    path = deployment / "server" / "runs" / "fedavg-seed0" / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def lines(deployment, site):
    path = deployment / "sites" / site / "runs" / "fedavg-seed0" / "ledger" / f"{site}.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_approve_revoke_and_a_stolen_kit(deployment, tmp_path):
    kit = deployment / "sites" / "site-1"
    site = lambda *words: polyclinic("site", *words, "--kit", kit)  # noqa: E731
    watching = start_polyclinic("deploy", "submit", tmp_path / "study.toml", "-d", deployment)
    wait_for(lambda: "fedavg-seed0: waits since" in site("pending"))
    wait_for(lambda: "site-1: the study waits for approval" in polyclinic("deploy", "status", "-d", deployment))
    assert rounds(deployment) == []
    site("approve", "fedavg-seed0")
    wait_for(lambda: len(rounds(deployment)) >= 2)
    assert rounds(deployment)[0]["failed"] == {}
    assert "fedavg-seed0: at work. It was approved by " in site("status")
    nobody_else_can_look(deployment)

    site("revoke", "fedavg-seed0")
    left = lines(deployment, "site-1")
    wait_for(lambda: "was revoked" in rounds(deployment)[-1]["failed"].get("site-1", ""))
    seen = len(rounds(deployment))
    wait_for(lambda: len(rounds(deployment)) > seen + 1)
    assert lines(deployment, "site-1") == left

    told = polyclinic("deploy", "revoke-site", "site-3", "-d", deployment)
    assert re.search("job .* was stopped", told)
    output, _ = watching.communicate()
    assert "site-1: the study waits for approval at the site" in output
    assert watching.returncode == 1
    polyclinic("deploy", "down", "-d", deployment)
    polyclinic("deploy", "up", "--here", "server", "site-1", "site-2", "-d", deployment)
    thief = Rehearsal(deployment)
    thief.up(["site-3"])
    log = deployment / "sites" / "site-3" / "log.txt"
    wait_for(lambda: "disabled" in log.read_text() or "site-3" not in thief.running())
    assert "connected: site-1, site-2\n" in polyclinic("deploy", "status", "-d", deployment)


def nobody_else_can_look(deployment):
    """Files are their owner's only, sites listen on loopback only, and no command line has text of the study."""
    for path in deployment.rglob("*"):
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    for name, pid in Rehearsal(deployment).running().items():
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for one in tree:
            assert "local_steps" not in " ".join(one.cmdline())
            listening = [c.laddr for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            assert name == "server" or {address.ip for address in listening} <= {"127.0.0.1"}
            for address in listening if name != "server" else []:
                turns_strangers_away(address, deployment / "sites" / name / "startup" / "rootCA.pem")


def turns_strangers_away(address, authority):
    """The listener shows a certificate of the federation, and ends the connection of who has none."""
    context = ssl.create_default_context(cafile=authority)
    context.check_hostname = False
    encrypted = context.wrap_socket(socket.create_connection(address))
    with encrypted, pytest.raises((ssl.SSLError, ConnectionResetError)):
        encrypted.recv(1)
