"""The readme of each kit: what is in the folder, what to do with it, what never to do. It replaces NVFlare's."""

from __future__ import annotations

import textwrap
from pathlib import Path

from polyclinic import __version__

SITE = """
This is the kit of the site '{name}'.

It lets your hospital take part in a federation: studies come from the server
{server}, your images stay on your machine, and what your policy allows leaves it.

THE FOLDER HOLDS PRIVATE KEYS. Whoever has it can act as your site. Send it by a safe way,
keep it readable by one user only, and tell the coordinator at once if it is lost.

BEGIN
1. Install the same version everywhere: pip install 'polyclinic[nvflare,segmentation]=={version}'
2. local/site.toml: say where your images are. The coordinator never sees this file.
3. local/policy.toml: say what may leave. Every line explains itself.
4. polyclinic deploy start FOLDER        (it connects, waits for studies, and reconnects)

EVERY DAY (in this folder, or with --kit FOLDER)
polyclinic site pending                  studies that wait for a decision of yours
polyclinic site show RUN                 what a study asks of your site, in sentences
polyclinic site approve RUN              or: refuse; later: revoke
polyclinic site status                   what left so far, and what is left of your budgets
polyclinic ledger FOLDER/runs/RUN        every parcel that left

WHAT IS HERE
startup/     certificate and private key of your site, address of the server; do not change
local/       your own settings, and the keys that sign your ledgers
runs/        one folder for each study: ledger, model
approvals/   your decisions, signed
anchors/     the ends of your ledgers; keep them with the ledgers
failures.log why work failed; it may name files, and it stays here

The site opens outgoing connections to {server} only. Nothing has to be opened in
your firewall. The certificate ends after a year; then the coordinator sends a new kit.

TO LEAVE FOR GOOD: stop the site, then `polyclinic site leave --yes`.
More: docs/deploy.md and docs/hospital_it.md of Polyclinic.
"""
SERVER = """
This is the kit of the server of a federation. Sites reach it as {server}.

THE FOLDER HOLDS PRIVATE KEYS: keep it readable by one user only.

1. Install: pip install 'polyclinic[nvflare,segmentation]=={version}', the same version as the sites.
2. Let the sites reach the port. No other port is needed.
3. polyclinic deploy start FOLDER

runs/     studies with their checkpoints and results; back them up
local/    settings of the server, and the key that signs what it received
startup/  certificate and private key; do not change

Studies are submitted with the kit `admin`: polyclinic deploy submit STUDY.
More: docs/deploy.md and docs/hospital_it.md of Polyclinic.
"""
ADMIN = """
This is the kit of whoever submits studies. It holds a private key.

polyclinic deploy submit STUDY           run a study, and watch over it
polyclinic deploy status                 who is connected, how far every run is
polyclinic deploy fetch --out FOLDER     model, result and history of a run

Leave this folder where `polyclinic deploy init` wrote it: the commands look for it there.
More: docs/deploy.md of Polyclinic.
"""
FILE = "README.txt"


def write_readmes(folder: Path, sites: tuple[str, ...], address: str) -> None:
    """Put our readme into the kits of a deployment in place of NVFlare's; `address` is the server's host:port."""
    texts = {folder / "sites" / name: SITE for name in sites}
    texts |= {folder / "server": SERVER, folder / "admin": ADMIN}
    for kit, text in texts.items():
        for old in (kit / "readme.txt", kit / "startup" / "readme.txt"):
            old.unlink(missing_ok=True)
        filled = text.format(name=kit.name, server=address, version=__version__)
        (kit / FILE).write_text(textwrap.dedent(filled).lstrip(), encoding="utf-8")
