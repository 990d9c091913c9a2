"""Keys for kits of tests: drawn for each site and the coordinator, as if the people of all had confirmed one list."""

from collections.abc import Mapping
from pathlib import Path

from polyclinic.data.allowed_paths import COORDINATOR
from polyclinic.deployment.confirmation import Coordinator, OwnKeys, Roster, pin
from polyclinic.federation.ledger.keys import signing_public_key


def pin_keys(local: Mapping[str, Path], coordinator: Path) -> Roster:
    """A sealing and a signing key for each site, and a signing key for the coordinator, each into its own kit only, and
    the public keys of all into every kit. `local` are the sites' folders `local`, by name."""
    own = {name: OwnKeys.draw() for name in (*local, COORDINATOR)}
    asks = {"server": "localhost", "port": 8002, "authority": "none"}
    signing = signing_public_key(own[COORDINATOR].signing).hex()
    sites = {name: own[name].public for name in local}
    roster = Roster(coordinator=Coordinator(**asks, signing=signing), sites=sites)
    for name, folder in local.items():
        pin(folder, roster, own[name])
    pin(coordinator, roster, OwnKeys(None, own[COORDINATOR].signing))
    return roster
