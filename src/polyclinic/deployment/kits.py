"""Kits: the folders that participants start from. A site's is made at the site, when its people have confirmed the
list of all (`joining.py`); a rehearsal has all of them on one machine.

DEPLOYMENT/study.toml        the study as it is sent: no path, no image, no partition
DEPLOYMENT/server/           the kit of the coordinator's machine
DEPLOYMENT/admin/            the kit of who submits studies
DEPLOYMENT/sites/NAME/       in a rehearsal: the kit of a site; local/site.toml and local/policy.toml are its own
DEPLOYMENT/site_keys.toml    the public keys of all, for whoever checks ledgers
DEPLOYMENT/authority/        the key that signs certificates: keep it, and show it to nobody
"""

import contextlib
import io
import json
import re
import shutil
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from polyclinic import __version__
from polyclinic.data.allowed_paths import refuse_coordinator
from polyclinic.data.parts import PreparedSites, prepare
from polyclinic.data.source import AtSites
from polyclinic.data.volumes.source import OfVolumes
from polyclinic.deployment.approval_rules import SITE_DEFAULTS, TABLE, ApprovalRules, policy_of
from polyclinic.engines.nvflare.job import CLASSES
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.kinds import DANGEROUS, KINDS
from polyclinic.federation.policy import Policy
from polyclinic.files import atomic_write, make_private, read_json
from polyclinic.runner.run.recorder import Display
from polyclinic.study import Study, parse_study
from polyclinic.study.policy_check import refused_by
from polyclinic.study.template import settings_with_comments

if TYPE_CHECKING:
    from polyclinic.deployment.joining import Admission

ADMIN = "admin@polyclinic.org"
PROJECT = "polyclinic"
#: days that the authority for certificates lasts; a certificate of a participant lasts a year
AUTHORITY_DAYS = 3650
#: what a participant lets the administrator do: run studies, and look; never bring code, never read files
RIGHTS = {
    **dict.fromkeys(("submit_job", "clone_job", "manage_job", "download_job", "view", "operate", "app_command"), "any"),
    **dict.fromkeys(("shell_commands", "byoc"), "none"),
}


#: how the folders begin in which a kit is made; one that a killed process left has a copy of the TLS key
SCRATCH = ".confirm-"
#: NVFlare's listener for its own processes on a machine: by default any user of the machine could connect to it
LOCAL_LISTENER = {"internal": {"scheme": "tcp", "resources": {"host": "localhost", "connection_security": "mtls"}}}


def rehearse(study: Study, folder: Path, *, server: str, port: int, display: Display) -> tuple[str, ...]:
    """Write a deployment with the kits of all on this machine, for a study with images; the sites' names.

    Each site gets its part of the images as its own. Keys are drawn and confirmed as hospitals do, by one hand."""
    from polyclinic.deployment.joining import admit, confirm, invite, join, to_confirm

    if folder.exists() and any(folder.iterdir()):
        raise BadInput(f"--out {folder}: is not empty; name a new folder")
    parts = prepare(study.data, study.sites, progress=display.preparing)
    sent = as_sent(study, parts, parts.names)
    assert isinstance(sent.data, AtSites)
    invitation = invite(folder, parts.names, sent.data.dataset, server, port, rehearsal=True)
    places = {name: folder / "sites" / name for name in parts.names}
    requests = [join(invitation, name, kit) for name, kit in places.items()]
    admission = admit(folder, requests)
    for name, kit in places.items():
        write_own_settings(kit, sent.data.dataset, parts.folder / name)
        confirm(to_confirm(kit, admission), admission.roster.words)
    (folder / "study.toml").write_text(sent.to_toml(), encoding="utf-8")
    make_private(folder)
    return parts.names


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
    if isinstance(data, OfVolumes):
        own = data.model_dump(mode="json", include={"channels", "structures", "preparation"}, exclude_none=True)
        table |= {"source": "volumes-at-sites", **own}
    tables = study.as_tables() | {"data": table, "sites": {"partition": "column", "names": list(names)}}
    tables["engine"] = {**tables["engine"], "name": "nvflare"}
    return parse_study(tables)


def provision_coordinator(folder: Path, server: str, port: int) -> str:
    """The kits of server and admin, made by NVFlare, and the authority for certificates; its certificate."""
    admin = {"name": ADMIN, "type": "admin", "org": "coordinator", "role": "project_admin"}
    builder = {"path": "polyclinic.deployment.programs.CertBuilder", "args": {"root_valid_days": AUTHORITY_DAYS}}
    with _provisioned(folder, server, port, admin, builder) as made:
        shutil.move(made / "prod_00" / server, folder / "server")
        shutil.move(made / "prod_00" / ADMIN, folder / "admin")
        shutil.move(made / "state", folder / "authority")
    _write_server(folder / "server")
    write_readme(folder / "server", README_OF_SERVER, f"{server}:{port}")
    write_readme(folder / "admin", README_OF_ADMIN, f"{server}:{port}")
    return str(read_json(folder / "authority" / "cert.json")["root_cert"])


def organisation(site: str) -> str:
    return re.sub(r"\W", "_", site)


def issue(authority: Path, name: str, organisation: str, public: Any, **more: Any) -> str:
    """A certificate (PEM), valid for a year, by the authority of a deployment."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from nvflare.lighter.utils import serialize_cert

    from polyclinic.deployment.programs import CertBuilder

    key = load_pem_private_key(read_json(authority / "cert.json")["root_pri_key"].encode(), None)
    return serialize_cert(CertBuilder._generate_cert(name, organisation, PROJECT, key, public, **more)).decode()


def renew_coordinator(folder: Path, server: str) -> None:
    """New certificates for the keys of server and admin."""
    from cryptography import x509

    roles: dict[str, Any] = {"server/startup/server.crt": {"server_default_host": server}}
    roles["admin/startup/client.crt"] = {"role": "project_admin"}
    for place, more in roles.items():
        public = x509.load_pem_x509_certificate((folder / place).read_bytes()).public_key()
        name = server if "server_default_host" in more else ADMIN
        atomic_write(folder / place, issue(folder / "authority", name, "coordinator", public, **more))


@contextlib.contextmanager
def _provisioned(folder: Path, server: str, port: int, other: dict[str, Any], certificates: dict[str, Any]) -> Any:
    """What NVFlare makes for the server and one other participant, in a folder that goes when the block ends."""
    from nvflare.lighter.prov_utils import prepare_builders
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    place = "nvflare.lighter.impl"
    builders = [
        {"path": f"{place}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
        {"path": f"{place}.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
        certificates,
    ]
    first = {"name": server, "type": "server", "org": "coordinator", "fed_learn_port": port}
    project = {"api_version": 3, "name": PROJECT, "participants": [first, other], "builders": builders}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        with contextlib.redirect_stdout(io.StringIO()):  # it names a folder that will not stay
            Provisioner(scratch, prepare_builders(project)).provision(prepare_project(project))
        yield Path(scratch) / PROJECT


def write_site(kit: Path, name: str, admission: "Admission", tls_key: Path, relay: str) -> None:
    """Put what NVFlare needs into a site's kit; what its people may have changed there stays."""
    coordinator = admission.roster.coordinator
    with tempfile.TemporaryDirectory(dir=kit, prefix=SCRATCH) as scratch:
        files = {"cert_path": admission.certificates[name], "rootca_path": coordinator.authority}
        for argument, text in files.items():
            (Path(scratch) / argument).write_text(text)
        paths = {argument: str(Path(scratch) / argument) for argument in files} | {"key_path": str(tls_key)}
        place = "nvflare.tool.package.package_commands.PrebuiltCertBuilder"
        builder = {"path": place, "args": {**paths, "target_name": name}}
        site = {"name": name, "type": "client", "org": organisation(name)}
        with _provisioned(Path(scratch), coordinator.server, coordinator.port, site, builder) as made:
            for file in sorted((made / "prod_00" / name).rglob("*")):
                target = kit / file.relative_to(made / "prod_00" / name)
                if file.is_dir():
                    target.mkdir(mode=0o700, exist_ok=True)
                else:
                    atomic_write(target, file.read_bytes(), private=True)
                    target.chmod(file.stat().st_mode & 0o700)
    local = kit / "local"
    if relay:
        settings = read_json(kit / "startup" / "fed_client.json")
        settings["servers"][0]["service"]["target"] = relay
        _write_json(kit / "startup" / "fed_client.json", settings)
    resources = read_json(local / "resources.json.default")
    # NVFlare would send a site's error log to the server, and patients' file names with it
    kept = [one for one in resources["components"] if one["id"] != "site_log_streamer"]
    _write_json(local / "resources.json", resources | {"components": kept, "allow_log_streaming": False} | _classes())
    _write_json(local / "authorization.json", _rights())
    _write_json(local / "comm_config.json", LOCAL_LISTENER)
    write_readme(kit, README_OF_SITE, f"{coordinator.server}:{coordinator.port}")


def write_own_settings(kit: Path, dataset: str, images: Path | None = None) -> None:
    """The files of a kit that are its people's to change, where they are missing; `images` are the part of a rehearsed
    site."""
    local = kit / "local"
    local.mkdir(mode=0o700, exist_ok=True)
    if not (local / "policy.toml").exists():
        (local / "policy.toml").write_text(_policy_text(images is not None), encoding="utf-8")
    if (local / "site.toml").exists():
        return
    text = SITE_EXAMPLE.format(dataset=dataset)
    if images is not None:
        shutil.copytree(images, kit / "data" / images.name)
        text = tomli_w.dumps({"datasets": {dataset: {"prepared": f"../data/{images.name}"}}})
    (local / "site.toml").write_text(SITE_HEAD + SITE_PLUGINS + text, encoding="utf-8")


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
POLICY_HEAD = f"""# What this site lets out, whatever the coordinator asks. The gate reads this file when a run starts.
# These five lines are the ones that people change. From {", ".join(DANGEROUS[3:])} images of
# single patients can be rebuilt: add such a kind only for a study that you have understood.
"""
MORE_HEAD = """
# --- the rest is for special cases ---
"""
INCOMING_HEAD = """
# What the coordinator sends is inspected before your site works with it (docs/incoming.md)."""
APPROVE_HEAD = """
# A study waits until a person at this site has approved it (`polyclinic site pending`), unless a rule here does."""


#: the settings that people change, before all others in the file
FIRST = ("kinds", "min_cohort", "max_bytes", "max_epsilon", "max_scores")


def first_policy(*, rehearsed: bool = False) -> Policy:
    """The policy of a new kit; a rehearsal lets out all but real images, and the scores and bits of a run in one
    process."""
    if not rehearsed:
        return Policy(**SITE_DEFAULTS, min_cohort=10)
    kinds = tuple(kind for kind in KINDS.builtin if kind != "real-images")
    same: dict[str, Any] = {"scores": "fine", "draws": "study", "shares": "equal", "few_images": "allow", "liars": 0}
    return Policy(**{**SITE_DEFAULTS, "kinds": kinds, "min_cohort": 1, "min_sites": 3, **same})


def foreseen_refusals(study: Study, folder: Path) -> list[str]:
    """What a site with the first policy of its kit will refuse, or one that is rehearsed in a folder, with its own: the
    coordinator hears it here, and not from sites, whose reasons may depend on their images."""
    files = {file.parent.parent.name: file for file in sorted((folder / "sites").glob("*/local/policy.toml"))}
    first = {"a site with the first policy of its kit": first_policy().model_copy(update={"deployed": True})}
    policies = {name: policy_of(file) for name, file in files.items()} or first
    found = {name: refused_by(study, policy) for name, policy in policies.items()}
    return [f"{name} will refuse this study: {one}" for name, some in found.items() for one in some]


def _policy_text(rehearsed: bool) -> str:
    """Every setting of a policy with what it means."""
    chosen, rules = first_policy(rehearsed=rehearsed), settings_with_comments(ApprovalRules(every=rehearsed))
    each = {name: settings_with_comments(chosen, without=({*Policy.model_fields} - {name})) for name in FIRST}
    more = settings_with_comments(chosen, without=("deployed", "incoming", *FIRST))
    tables = [INCOMING_HEAD, "[incoming]", *settings_with_comments(chosen.incoming), APPROVE_HEAD, f"[{TABLE}]", *rules]
    each["kinds"][1:] = [f"kinds = {json.dumps(chosen.kinds)}"]
    lines = [line for name in FIRST for line in each[name]]
    return "\n".join([POLICY_HEAD, *lines, MORE_HEAD, *more, *tables, ""])


README_OF_SITE = """
This is the kit of the site '{name}'.

It lets your hospital take part in a federation: studies come from the server
{server}, your images stay on your machine, and what your policy allows leaves it.

THE FOLDER HOLDS PRIVATE KEYS, which were drawn here. Whoever has it can act as your site.
Send it to nobody, keep it readable by one user only, and tell the other sites if it is lost.
If it came from somebody else, or local/confirmed.json says "rehearsal": true, others have its
keys: use it with no patient's images, and make your own (polyclinic site join).

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
local/       your own settings; your keys; who takes part, as you confirmed it
runs/        one folder for each study: ledger, model
approvals/   your decisions, signed
anchors/     the ends of your ledgers; keep them with the ledgers
failures.log why work failed; it may name files, and it stays here

The site opens outgoing connections to {server} only. Nothing has to be opened in
your firewall. The certificate ends after a year; then the coordinator sends a new
admission.json, for: polyclinic site confirm admission.json

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


def write_readme(kit: Path, text: str, address: str) -> None:
    """Put our readme into a kit in place of NVFlare's; `address` is the server's host:port."""
    for old in (kit / "readme.txt", kit / "startup" / "readme.txt"):
        old.unlink(missing_ok=True)
    filled = text.format(name=kit.name, server=address, version=__version__)
    (kit / "README.txt").write_text(textwrap.dedent(filled).lstrip(), encoding="utf-8")
