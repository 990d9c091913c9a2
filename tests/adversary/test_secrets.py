"""Attack: guess what a site draws in secret, because it is always the same, or the same at every site."""

import json

import torch
from attacked_site import PRIVATE, Kit, ask, first_weights

from polyclinic.federation.ledger.keys import PRIVATE_FILE, SIGNING_FILE, KitKeys, public_key, seal_box
from polyclinic.federation.ledger.ledger import Ledger, verify


def noise_key(kit, run):
    kit.host(run).sites.get("north")
    return (kit.folder / "runs" / run / "sites" / "north" / "noise.key").read_text()


def test_every_run_of_every_site_has_a_secret_of_its_own(kit, tmp_path):
    other = Kit(tmp_path / "elsewhere" / "kit")
    found = [noise_key(kit, "a"), noise_key(kit, "b"), noise_key(other, "a")]
    assert len(set(found)) == 3
    assert {len(bytes.fromhex(one)) for one in found} == {32}
    assert noise_key(kit, "a") == found[0]  # a resumed run draws the same


def test_keys_and_splits_of_two_sites_differ(kit, tmp_path):
    other = Kit(tmp_path / "elsewhere" / "kit")
    for name in (PRIVATE_FILE, SIGNING_FILE):
        keys = {(folder / name).read_bytes() for folder in (kit.folder / "local", kit.south, other.folder / "local")}
        assert len(keys) == 3
    seeds = []
    for one in (kit, other):
        one.host().sites.get("north")
        seeds.append(json.loads((one.folder / "local" / "splits.json").read_text())["scans"]["seed"])
    assert seeds[0] != seeds[1]


def test_the_noise_of_the_same_private_study_differs_from_run_to_run(kit):
    weights = first_weights(kit.host("first"))
    kit.policy(draws="study")  # so that nothing but the noise and the private batches can differ
    found = [ask(kit.host(r, privacy=PRIVATE), "train", weights=weights).parcels[0].tensors for r in ("a", "b")]
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_two_boxes_with_the_same_content_and_two_lines_about_it_differ(kit, tmp_path):
    sender = KitKeys(kit.south).own("")
    boxes = [seal_box(b"the same", {}, sender=sender, recipient=public_key(sender)) for _ in range(2)]
    assert boxes[0][:32] != boxes[1][:32]
    assert boxes[0][32:] != boxes[1][32:]
    ledger = Ledger(tmp_path / "north.jsonl")
    for number in range(2):
        ledger.append(round=number, operation="give", kind="weights", bytes=1, digest="d", to="south", salted=True)
    first, second = verify(ledger.path)
    assert first["salt"] != second["salt"]
