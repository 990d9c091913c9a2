"""Kits: what each participant of a federation needs to take part, made once from a study's sites.

DEPLOYMENT/study.toml        the study as it is sent: no path, no image, no partition
DEPLOYMENT/server/           the kit of the coordinator's machine
DEPLOYMENT/admin/            the kit of who submits studies
DEPLOYMENT/sites/NAME/       the kit of a site; local/site.toml and local/policy.toml are the site's own to change
DEPLOYMENT/site_keys.toml    the public keys of all, for whoever checks ledgers
DEPLOYMENT/authority/        the key that signed the kits' certificates: keep it, and show it to nobody
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import shutil
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyclinic import __version__
from polyclinic.data.allowed_paths import COORDINATOR, refuse_coordinator
from polyclinic.data.parts import PreparedSites, prepare
from polyclinic.data.source import AtSites
from polyclinic.deployment.approval_rules import MAX_SCORES, TABLE, ApprovalRules
from polyclinic.engines.nvflare.job import CLASSES
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.keys import PRIVATE_FILE, PUBLIC_FILE, SIGNING_FILE, public_key, signing_public_key
from polyclinic.federation.policy import Policy
from polyclinic.files import atomic_write, make_private
from polyclinic.runner.run.recorder import Display
from polyclinic.study import Study, parse_study
from polyclinic.study.template import settings_with_comments

ADMIN = "admin@polyclinic.org"
PROJECT = "polyclinic"
#: what a participant lets the administrator do: run studies, and look; never bring code, never read files
RIGHTS = {
    **dict.fromkeys(("submit_job", "clone_job", "manage_job", "download_job", "view", "operate", "app_command"), "any"),
    **dict.fromkeys(("shell_commands", "byoc"), "none"),
}


#: NVFlare's listener for its own processes on a machine: by default any user of the machine could connect to it
LOCAL_LISTENER = {"internal": {"scheme": "tcp", "resources": {"host": "localhost", "connection_security": "mtls"}}}


def make_kits(study: Study, folder: Path, *, server: str, port: int, display: Display) -> tuple[str, ...]:
    """Write a deployment for the study's sites, and return their names.

    Where the study has images (it is a rehearsal), each site gets its part of them as its own.
    """
    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"--out {folder}: is not empty; name a new folder")
    rehearsed = not isinstance(study.data, AtSites)
    parts = prepare(study.data, study.sites, progress=display.preparing) if rehearsed else None
    names = parts.names if parts else study.sites.site_names()
    check_names(names)
    sent = as_sent(study, parts, names) if parts else study
    folder.mkdir(parents=True, exist_ok=True)
    _provision(folder, names, server, port)
    pin_keys({name: folder / "sites" / name / "local" for name in names}, folder / "server" / "local")
    shutil.copy(folder / "server" / "local" / PUBLIC_FILE, folder / PUBLIC_FILE)
    for name in names:
        _write_site(folder / "sites" / name, name, sent.data, parts)
    _write_server(folder / "server")
    write_readmes(folder, names, f"{server}:{port}")
    (folder / "study.toml").write_text(sent.to_toml(), encoding="utf-8")
    make_private(folder)
    return names


def check_names(names: tuple[str, ...]) -> None:
    """BadInput for names that certificates of NVFlare cannot have."""
    if not names:
        raise BadInput("sites.names: a deployed study names its sites")
    for name in names:
        refuse_coordinator(name)
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name == "server":
            raise BadInput(f"sites.names: '{name}' cannot be deployed; use letters, digits, '-' and '_'")


def as_sent(study: Study, parts: PreparedSites, names: tuple[str, ...]) -> Study:
    """The study as sites get it: their images have a name, and what must be known of them, but no place."""
    info, data = parts.info, study.data
    table = {
        "source": "at-sites",
        "dataset": data.source,
        "classes": info["classes"],
        **{name: info[name] for name in ("channels", "unit", "label_range") if info[name]},
        **{name: getattr(data, name) for name in ("size", "validation", "test", "seed")},
    }
    tables = study.as_tables() | {"data": table, "sites": {"partition": "column", "names": list(names)}}
    tables["engine"] = {**tables["engine"], "name": "nvflare"}
    return parse_study(tables)


def _provision(folder: Path, names: tuple[str, ...], server: str, port: int) -> None:
    """Certificates and start-up kits, made by NVFlare from a project that stays with the authority."""
    import yaml
    from nvflare.lighter.prov_utils import prepare_builders
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    participants = [{"name": server, "type": "server", "org": "coordinator", "fed_learn_port": port}]
    participants += [{"name": name, "type": "client", "org": re.sub(r"\W", "_", name)} for name in names]
    participants += [{"name": ADMIN, "type": "admin", "org": "coordinator", "role": "project_admin"}]
    project = {"api_version": 3, "name": PROJECT, "participants": participants, "builders": _builders()}
    written = copy.deepcopy(project)  # NVFlare changes the one that it is given
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        with contextlib.redirect_stdout(io.StringIO()):  # it names a folder that will not stay
            Provisioner(scratch, prepare_builders(project)).provision(prepare_project(project))
        made = Path(scratch) / PROJECT
        kits = made / "prod_00"
        (folder / "sites").mkdir()
        for name in names:
            shutil.move(kits / name, folder / "sites" / name)
        shutil.move(kits / server, folder / "server")
        shutil.move(kits / ADMIN, folder / "admin")
        shutil.move(made / "state", folder / "authority")
    (folder / "authority" / "project.yml").write_text(yaml.safe_dump(written, sort_keys=False), encoding="utf-8")


def _builders() -> list[dict[str, Any]]:
    place = "nvflare.lighter.impl"
    return [
        {"path": f"{place}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
        {"path": f"{place}.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
        {"path": "polyclinic.deployment.programs.CertBuilder"},
        {"path": f"{place}.signature.SignatureBuilder"},
    ]


def pin_keys(local: Mapping[str, Path], coordinator: Path) -> None:
    """A sealing and a signing key for each site and a signing key for the coordinator, each into its own kit only, and
    the public keys of all into every kit. `local` are the sites' folders, by name.

    So nobody has to trust a key that comes through the coordinator."""
    sealing = {name: X25519PrivateKey.generate() for name in local}
    signing = {name: Ed25519PrivateKey.generate() for name in (*local, COORDINATOR)}
    public = {
        "sealing": {name: public_key(key).hex() for name, key in sealing.items()},
        "signing": {name: [signing_public_key(key).hex()] for name, key in signing.items()},
    }
    for name, folder in {**local, COORDINATOR: coordinator}.items():
        if name in sealing:
            atomic_write(folder / PRIVATE_FILE, sealing[name].private_bytes_raw(), private=True)
        atomic_write(folder / SIGNING_FILE, signing[name].private_bytes_raw(), private=True)
        atomic_write(folder / PUBLIC_FILE, KEYS_HEAD + tomli_w.dumps(public))


def _write_site(kit: Path, name: str, data: Any, parts: PreparedSites | None) -> None:
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    # NVFlare would send a site's error log to the server, and patients' file names with it
    kept = [one for one in resources["components"] if one["id"] != "site_log_streamer"]
    _write_json(local / "resources.json", resources | {"components": kept, "allow_log_streaming": False} | _classes())
    _write_json(local / "authorization.json", _rights())
    _write_json(local / "comm_config.json", LOCAL_LISTENER)
    (local / "policy.toml").write_text(_policy_text(parts is not None), encoding="utf-8")
    head = SITE_HEAD + SITE_PLUGINS
    if parts:
        shutil.copytree(parts.folder / name, kit / "data" / name)
        where: dict[str, Any] = {"prepared": f"../data/{name}"}
        (local / "site.toml").write_text(head + tomli_w.dumps({"datasets": {data.dataset: where}}))
    else:
        (local / "site.toml").write_text(head + SITE_EXAMPLE.format(dataset=data.dataset), encoding="utf-8")


def _write_server(kit: Path) -> None:
    resources = json.loads((kit / "local" / "resources.json.default").read_text())
    resources["servers"][0]["heart_beat_timeout"] = 60  # so that nobody counts a dead site among the connected for long
    _write_json(kit / "local" / "resources.json", resources | _classes())
    _write_json(kit / "local" / "authorization.json", _rights())
    _write_json(kit / "local" / "comm_config.json", LOCAL_LISTENER)
    (kit / "local" / "site.toml").write_text(SERVER_HEAD + SITE_PLUGINS.replace("site", "server"), encoding="utf-8")


def _classes() -> dict[str, Any]:
    return {"class_list_enforcement_mode": "enforce", "class_allow_list": list(CLASSES)}


def _rights() -> dict[str, Any]:
    return {"format_version": "1.0", "permissions": {"project_admin": RIGHTS}}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")


KEYS_HEAD = """# The public keys of all, made with the kits. Nothing is sealed for a site that has no sealing key here.
# Ledger lines are signed with the signing keys: a list for each name, the oldest first, as keys may be rotated.
"""
SITE_HEAD = """# This site's own settings. They stay here: the coordinator knows datasets by their names only.
"""
SERVER_HEAD = """# The server's own settings; no study can change them.
"""
SITE_PLUGINS = """
# Code from outside that this site trusts: modules, Python files or installed packages. A study brings none.
# plugins = ["my_package"]

"""
SITE_EXAMPLE = """# Say where the images are: `polyclinic data list` names all sources, `data show` what each needs.
# Paths are relative to this file.

[datasets.{dataset}]
source = "folder"
path = "/data/{dataset}"
"""
POLICY_HEAD = (
    """# What this site lets out, whatever the coordinator asks. The gate reads this file when a run starts."""
)
INCOMING_HEAD = """
# What the coordinator sends is inspected before your site works with it (docs/incoming.md)."""
APPROVE_HEAD = """
# A study waits until a person at this site has approved it (`polyclinic site pending`), unless a rule here does."""


def _policy_text(rehearsed: bool) -> str:
    """Every setting of a policy with what it means; a rehearsal lets out all but real images."""
    from polyclinic.federation.ledger.kinds import KINDS

    kinds = tuple(kind for kind in KINDS.builtin if kind != "real-images") if rehearsed else Policy().kinds
    scores: Any = "fine" if rehearsed else "coarse"  # a rehearsal gives the scores of a run in one process
    draws: Any = "study" if rehearsed else "own"  # and its bits
    few: Any = "allow" if rehearsed else "refuse"  # and its images, which are few
    cohort = 1 if rehearsed else 10
    shares: Any = "equal" if rehearsed else "random"
    chosen = Policy(
        kinds=kinds,
        min_cohort=cohort,
        few_images=few,
        max_scores=MAX_SCORES,
        scores=scores,
        draws=draws,
        shares=shares,
        **({"min_sites": 3, "liars": 0} if rehearsed else {}),  # the sums of a simulation, and its noise
    )
    rules = settings_with_comments(ApprovalRules(every=rehearsed))
    settings = settings_with_comments(chosen, without=("deployed", "incoming"))
    incoming = settings_with_comments(chosen.incoming)
    tables = [INCOMING_HEAD, "[incoming]", *incoming, APPROVE_HEAD, f"[{TABLE}]", *rules]
    return "\n".join([POLICY_HEAD, *settings, *tables, ""])


README_OF_SITE = """
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
README_OF_SERVER = """
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
README_OF_ADMIN = """
This is the kit of whoever submits studies. It holds a private key.

polyclinic deploy submit STUDY           run a study, and watch over it
polyclinic deploy status                 who is connected, how far every run is
polyclinic deploy fetch --out FOLDER     model, result and history of a run

Leave this folder where `polyclinic deploy init` wrote it: the commands look for it there.
More: docs/deploy.md of Polyclinic.
"""


def write_readmes(folder: Path, sites: tuple[str, ...], address: str) -> None:
    """Put our readme into the kits of a deployment in place of NVFlare's; `address` is the server's host:port."""
    texts = {folder / "sites" / name: README_OF_SITE for name in sites}
    texts |= {folder / "server": README_OF_SERVER, folder / "admin": README_OF_ADMIN}
    for kit, text in texts.items():
        for old in (kit / "readme.txt", kit / "startup" / "readme.txt"):
            old.unlink(missing_ok=True)
        filled = text.format(name=kit.name, server=address, version=__version__)
        (kit / "README.txt").write_text(textwrap.dedent(filled).lstrip(), encoding="utf-8")
