"""Leaving a study: a run carried out again without some patients, and a certificate of it that names nobody.

The split is that of the run, and the patients are taken out of it (`data.opt_out`), so that the new model is, to the
last bit, that of a run that never saw them, whatever the method. What left before cannot be called back; the
certificate says what it was.
"""

import hashlib
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from polyclinic.audits.open_run import images_of, read_ledgers, read_study
from polyclinic.data.opt_out import names_in, names_of
from polyclinic.data.own_images import find_kit
from polyclinic.data.partitions import Sites
from polyclinic.data.parts import load, spread
from polyclinic.data.source import AtSites, Source
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.files import atomic_write, check_place, digest_of, read_json, sha256_of
from polyclinic.json_types import JsonObject
from polyclinic.methods.shared.one_round import OneRound
from polyclinic.run_folder import check_whole, read_result
from polyclinic.runner.predict.model_file import MODEL, digest_of_weights
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.run import run
from polyclinic.study import Study

CERTIFICATE = "withdrawal.json"
#: kinds that are drawn at random, and know nobody
RANDOM_KINDS = ("keys", "shares")
SALT = "# salt: "


def places_of(data: Source, sites: Sites, names: Sequence[str], cache: Path | None = None) -> dict[str, dict[str, int]]:
    """How many images these patients have at each site, by split; sites without any are left out. BadInput, which does
    not repeat a name, where one is not in the data."""
    dataset = load(data, cache)
    known = names_of(dataset)
    if missing := set(names) - set(known.tolist()):
        called = "patients" if dataset.patient is not None else "images by number (the data names no patients)"
        raise BadInput(f"--patients: {len(missing)} of {len(names)} are none of the data's {called}; correct the list")
    rows = {row for row, name in enumerate(known.tolist()) if name in set(names)}
    where = spread(dataset, data.model_copy(update={"opt_out": None}), sites)
    found = {site: {s: len(rows & {*index.tolist()}) for s, index in parts.items()} for site, parts in where.items()}
    return {site: counts for site, counts in found.items() if any(counts.values())}


class Withdrawal:
    """Patients who leave a run of this machine. `cost` says what that takes, before anything is done."""

    def __init__(self, folder: Path, patients: Path, cache: Path | None = None) -> None:
        if find_kit(folder):
            raise BadInput(
                f"{folder}: is a site's part of a run; write the patients into local/opt-out.txt of its kit, which is "
                "read at every start, and have the coordinator run the study again"
            )
        check_whole(folder, "*")
        self.folder, self.study = folder, read_study(folder, None)
        if isinstance(self.study.data, AtSites):
            raise BadInput(f"{folder}: its images are at its sites; each writes them into local/opt-out.txt of its kit")
        self.result, self.lines = read_result(folder), read_ledgers(folder)
        listed, before = _listed(patients), self.study.data.opt_out
        left = names_in(before) if before else []
        self.names = [name for name in listed if name not in left]
        if not self.names:
            raise BadInput(f"--patients: all of them had left before {folder} began; there is nothing to withdraw")
        self.places = places_of(self.study.data, self.study.sites, self.names, cache)
        if not self.places:
            raise BadInput("--patients: none of them took part in this run; there is nothing to withdraw")
        self.all_names = sorted({*self.names, *left})
        self.first = min((line["round"] for site in self.places for line in self._told(site)), default=1)

    def _told(self, site: str) -> list[dict[str, Any]]:
        return [line for line in self.lines.get(site, []) if line["kind"] not in RANDOM_KINDS]

    def cost(self) -> list[str]:
        """Sentences about what has to be done, and why it cannot be less."""
        seconds, rounds = self.result.get("timing", {}).get("seconds", 0), self.result.get("rounds", 0)
        said = [
            f"{_counted(len(self.names), 'patient')} at {_counted(len(self.places), 'site')}: what they gave left from "
            f"round {self.first} of {rounds} on"
        ]
        if isinstance(self.study.method, OneRound):
            said.append(f"the sums of one round are asked for again, in about {seconds:.0f} s; the head is then exact")
        else:
            said.append(
                f"all {rounds} rounds are carried out again from the start, about {seconds:.0f} seconds: no checkpoint "
                f"is kept from before round {self.first}, and every later model knows them"
            )
        if self.study.federation.sum == "secure":
            said.append("a secure sum shows no site's part, so all sites must take part again, and not theirs alone")
        return said

    def carry_out(self, out: Path, display: Display | None = None, cache: Path | None = None) -> JsonObject:
        """The certificate, which is written into the new run's folder. An interrupted withdrawal goes on."""
        kept = out.with_name(f"{out.name}.opt-out.txt").absolute()
        check_place(out)
        if self.folder.resolve() in out.resolve().parents:
            raise BadInput(f"--out {out}: lies within the run, and so would the list; name a folder elsewhere")
        if not kept.exists():
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise BadInput(f"--out {out}: holds other files; name a new or empty folder")
            text = "\n".join([f"{SALT}{secrets.token_hex(16)}", *self.all_names, ""])
            atomic_write(kept, text, private=True)
        if names_in(kept) != self.all_names:
            raise BadInput(f"--out {out}: '{kept}' is of another withdrawal; name another folder")
        study = self.study.with_settings({"data.opt_out": str(kept)})
        run(study, out, resume=(out / "study.toml").exists(), display=display, cache=cache)
        content = self._certificate(out, kept)
        atomic_write(out / CERTIFICATE, json.dumps({**content, "sha256": digest_of(content)}, indent=1) + "\n")
        return content

    def _certificate(self, out: Path, kept: Path) -> JsonObject:
        knew = [
            {"site": site, **{name: line[name] for name in ("round", "operation", "kind", "digest", "to")}}
            for site in self.places
            for line in self._told(site)
        ]
        others = [lines for site, lines in self.lines.items() if site not in self.places]
        later = sum(line["round"] > self.first for lines in others for line in lines)
        return {
            "format": 1,
            "what": f"{_counted(len(self.names), 'patient')} left the study; nobody is named here",
            "patients": len(self.names),
            "commitment": commitment(kept),
            "exact": "the run was carried out again on the same split without them: the new model never saw them",
            "sites": sorted(self.places),
            "before": facts_of(self.folder),
            "after": facts_of(out),
            "knew": {"first_round": self.first, "parcels": knew, "later_lines_of_other_sites": later},
            "cannot_be_taken_back": self._remains(len(knew), later),
        }

    def _remains(self, direct: int, later: int) -> list[str]:
        privacy = self.result.get("privacy") or {}
        said = [
            f"{_counted(direct, 'parcel')} of their sites left before, and whoever received them may have copies; "
            f"{_counted(later, 'parcel')} of other sites came after and may carry traces",
            f"copies of the model '{str(self.result.get('weights_sha256'))[:12]}' that were given away",
        ]
        if privacy.get("epsilon") is not None:
            said.append(
                f"the privacy budget that the first run spent (epsilon {privacy['epsilon']:.3g}); this run adds its own"
            )
        return said


def facts_of(folder: Path) -> JsonObject:
    """What a certificate says of a run: digests that anybody with the folder computes again."""
    return {
        "run": folder.name,
        "study": digest_of(_without_list(read_study(folder, None))),
        "images_sha256": sha256_of(folder / "images.json"),
        "model_sha256": sha256_of(folder / MODEL),
        "weights_sha256": digest_of_weights(load_file(folder / MODEL)),
        "ledgers": {site: lines[-1]["digest_of_line"] if lines else "" for site, lines in read_ledgers(folder).items()},
    }


def check_certificate(before: Path, after: Path, patients: Path | None = None) -> list[str]:
    """What a certificate shows, in sentences; WorkFailed where it does not hold. Nothing is run again."""
    file = after / CERTIFICATE
    if not file.is_file():
        raise BadInput(f"{file}: there is no certificate; `polyclinic withdraw RUN --patients FILE` makes one")
    content = read_json(file)
    noted = content.pop("sha256", None)
    if noted != digest_of(content):
        raise WorkFailed(f"{file}: was changed since it was made")
    for name, folder in (("before", before), ("after", after)):
        now = facts_of(folder)
        if other := [key for key, value in content[name].items() if key != "run" and now.get(key) != value]:
            raise WorkFailed(f"{folder}: its {other[0]} is not what the certificate says")
    if content["before"]["study"] != content["after"]["study"]:
        raise WorkFailed(f"{file}: the two runs are of different studies")
    if content["before"]["images_sha256"] == content["after"]["images_sha256"]:
        raise WorkFailed(f"{file}: both runs have the same images; nobody was left out")
    lines, listed = read_ledgers(before), content["knew"]["parcels"]
    left = [line["digest"] for site in content["sites"] for line in lines[site] if line["kind"] not in RANDOM_KINDS]
    if left != [one["digest"] for one in listed]:
        raise WorkFailed(f"{file}: the parcels that it lists are not those of the ledgers")
    said = [
        "the two runs are of one study, and the second has other images; its weights are "
        f"{content['after']['weights_sha256'][:12]}",
        f"{_counted(len(listed), 'parcel')} that knew the patients: ledgers of {', '.join(content['sites'])} say so",
    ]
    if patients is not None:
        kept = read_study(after, None).data.opt_out
        if kept is None or commitment(kept) != content["commitment"]:
            raise WorkFailed(f"{file}: the list of this run is not the one that was certified")
        if missing := set(_listed(patients)) - set(names_in(kept)):
            raise WorkFailed(f"{file}: {_counted(len(missing), 'patient')} of the list did not leave by it")
        said.append("everybody in the list was left out")
    return said


def commitment(kept: Path) -> str:
    """A digest of the list and its salt: whoever has both can show who left, and nobody else can guess."""
    salt = kept.read_text(encoding="utf-8").partition("\n")[0].removeprefix(SALT)
    return hashlib.sha256("\n".join([salt, *names_in(kept)]).encode()).hexdigest()


def _listed(patients: Path) -> list[str]:
    if not (names := names_in(patients, "--patients")):
        raise BadInput(f"--patients: '{patients}' names nobody; write a patient in each line")
    return names


def _without_list(study: Study) -> JsonObject:
    tables = study.as_tables()
    tables["data"].pop("opt_out", None)
    return {name: table for name, table in tables.items() if name not in ("engine", "logging")}


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# --- who knew a patient -----------------------------------------------------------------------------------------


def runs_that_knew(folder: Path, patient: str) -> dict[str, dict[str, tuple[dict[str, int], list[dict[str, Any]]]]]:
    """By run, and there by site: how many images of the patient each split has, and the ledger's lines of that site.
    `folder`: a run folder, or a kit, of which all runs are looked at."""
    is_kit = (folder / "local" / "site.toml").is_file()
    folders = sorted((folder / "runs").glob("*/")) if is_kit else [folder]
    found = {}
    for one in folders:
        lines = read_ledgers(one)
        source, sites, cache = images_of(one, read_study(one, find_kit(one)), list(lines) or [""])
        try:
            places = places_of(source, sites, [patient], cache)
        except BadInput:
            if not is_kit:
                raise BadInput("PATIENT: there is nobody of this name in the data of this run") from None
            continue  # another dataset
        left = not is_kit and source.opt_out is not None and patient in names_in(source.opt_out)
        if places and not left:  # a kit's list may be younger than its runs
            found[one.name] = {site: (counts, lines.get(site, [])) for site, counts in places.items()}
    return found
