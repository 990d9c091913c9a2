"""Key rings: a simulated site's keys follow from the seed, a deployed site's lie in its kit."""

import pytest

from polyclinic.deployment.kits import pin_keys
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.keys import KitKeys, PublicKeys, SeedKeys, public_key, signing_public_key


def test_the_keys_of_simulated_sites_follow_from_the_seed_and_the_name():
    assert SeedKeys(1).public("a") == SeedKeys(1).public("a") == public_key(SeedKeys(1).own("a"))
    assert len({SeedKeys(seed).public(name) for seed in (1, 2) for name in "ab"}) == 4


def test_every_kit_has_its_own_private_key_and_the_public_keys_of_all(tmp_path):
    local = {name: tmp_path / name for name in ("north", "south")}
    for folder in (*local.values(), tmp_path / "server"):
        folder.mkdir()
    pin_keys(local, tmp_path / "server")
    rings = {name: KitKeys(folder) for name, folder in local.items()}
    for name, ring in rings.items():
        assert (local[name] / "sealing.key").stat().st_mode & 0o777 == 0o600
        assert [ring.public(other) for other in rings] == [public_key(one.own("")) for one in rings.values()]
        assert ring.public("phantom") is None
    assert rings["north"].public("north") != rings["south"].public("south")


def test_every_kit_has_its_own_signing_key_and_the_public_ones_of_all(tmp_path):
    local = {name: tmp_path / name for name in ("north", "south", "server")}
    for folder in local.values():
        folder.mkdir()
    pin_keys({name: local[name] for name in ("north", "south")}, local["server"])
    rings = {name: KitKeys(folder) for name, folder in local.items()}
    assert [ring.owner() for ring in rings.values()] == ["north", "south", "coordinator"]
    for name, ring in rings.items():
        assert (local[name] / "signing.key").stat().st_mode & 0o777 == 0o600
        mine = (signing_public_key(ring.signing_key()),)
        assert {other.verifying_keys(ring.owner()) for other in rings.values()} == {mine}
        assert ring.verifying_keys("phantom") == ()
    assert not (local["server"] / "sealing.key").exists()


@pytest.mark.parametrize("text", ["no toml", "[signing]\nnorth = ['xyz']", "[signing]\nnorth = ['00']"])
def test_a_damaged_file_of_public_keys_is_named(tmp_path, text):
    (tmp_path / "site_keys.toml").write_text(text)
    with pytest.raises(BadInput, match=r"site_keys\.toml"):
        PublicKeys(tmp_path / "site_keys.toml").verifying_keys("north")


def test_a_kit_without_keys_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"sealing\.key: no such file; `polyclinic deploy init` puts one into every kit"):
        KitKeys(tmp_path).own("north")
