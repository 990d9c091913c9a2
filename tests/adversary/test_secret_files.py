"""Secret files of a kit that are empty, short, known or gone: nothing is computed with them, and nothing leaves."""

import shutil

import pytest
from attacked_site import SITE, Kit, ask, first_weights

from polyclinic.errors import Damaged
from polyclinic.federation.host import secret_in
from polyclinic.federation.ledger.keys import KitKeys
from polyclinic.federation.site import Site


@pytest.fixture
def kit(tmp_path):
    return Kit(tmp_path / "kit")


@pytest.mark.parametrize(
    "content", ["", "0" * 63, "0" * 65, "g" * 64, "A" * 64, "\0" * 64, f" {'0' * 63}", "0" * 64 + "\n"]
)
def test_a_secret_of_noise_that_anybody_can_guess_is_damaged(kit, content):
    """An empty one would make the site draw its noise as a simulated site does, from the study's seed."""
    file = kit.folder / "runs" / "run" / "sites" / SITE / "noise.key"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    host = kit.host()
    with pytest.raises(Damaged, match=r"noise\.key: is damaged .*; bring it back from a copy"):
        ask(host, "train", weights=first_weights(host))
    assert file.read_text() == content


def test_a_secret_of_noise_that_is_gone_is_not_drawn_anew_once_something_has_left(kit):
    """Two draws of the noise of one release differ by noise alone: their mean has less of it."""
    file = kit.folder / "runs" / "run" / "sites" / SITE / "noise.key"
    shutil.rmtree(file.parent, ignore_errors=True)
    host = kit.host()
    ask(host, "train", weights=first_weights(host))
    file.unlink()
    host = kit.host()
    with pytest.raises(Damaged, match=r"noise\.key: is missing, and something has left"):
        ask(host, "train", round=2, weights=first_weights(host))
    assert not file.exists()


def test_a_secret_is_drawn_once(tmp_path):
    assert secret_in(tmp_path, begun=False) == secret_in(tmp_path, begun=True) != ""


def test_no_deployed_site_is_without_a_secret(kit):
    host = kit.host()
    whole = host.sites.get(SITE)
    with pytest.raises(ValueError, match="a deployed site has a secret"):
        Site(SITE, whole.study, whole.data, whole.trainer, whole.state, whole.place, kit=host.spec.kit)


@pytest.mark.parametrize("name", ["sealing.key", "signing.key"])
@pytest.mark.parametrize("content", [b"", bytes(31), bytes(32), bytes(33), b"\x07" * 32])
def test_a_key_that_is_not_the_sites_own_signs_and_opens_nothing(kit, name, content):
    """Cut short, filled with zeros by a loss of power, or put there by somebody who knows it."""
    file = kit.folder / "local" / name
    file.write_bytes(content)
    keys = KitKeys(kit.folder / "local")
    with pytest.raises(Damaged, match=rf"{name}: is damaged .*; bring it back from a copy"):
        keys.own(SITE) if name == "sealing.key" else keys.signing_key(SITE)
    file.unlink()
    with pytest.raises(Damaged, match=rf"{name}: is missing"):
        keys.own(SITE) if name == "sealing.key" else keys.signing_key(SITE)
