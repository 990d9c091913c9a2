"""Runs a study: sites, engine and method together, from nothing or from a checkpoint, into a run folder."""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from polyclinic import run_folder
from polyclinic.data.own_images import find_kit
from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import BadInput, Damaged
from polyclinic.federation.collaborators import Engine
from polyclinic.federation.federation import Federation
from polyclinic.files import PARTIAL, atomic_write, check_place, read_json, sync_files
from polyclinic.privacy.settings import check_budget
from polyclinic.progress import listening
from polyclinic.runner.evaluate.calibration import Calibration, calibrations_of, looks_of
from polyclinic.runner.evaluate.case_scores import keep_cases, read_cases
from polyclinic.runner.evaluate.case_statistics import statistics_of_cases
from polyclinic.runner.predict.model_file import MODEL, card_of, digest_of_weights, model_file
from polyclinic.runner.run import advice
from polyclinic.runner.run.assembly import WEIGHTS, Assembly
from polyclinic.runner.run.engines import check_engine, in_process_engine, ray_engine
from polyclinic.runner.run.machine import device_of, keep_freed_memory
from polyclinic.runner.run.method import ask_statistics, has_noised_scores, run_method
from polyclinic.runner.run.recorder import Display, Recorder
from polyclinic.runner.run.result import (
    Result,
    final_metrics,
    flat,
    released_models,
    result_of,
    take_counts,
    whose_part,
)
from polyclinic.runner.run.volume_memory import memory_sentence
from polyclinic.study import Study, load_run_study
from polyclinic.study.reading import DIGESTS, load_checked, note_plugins

#: what a run killed at its very beginning may leave in its folder
BEFORE_THE_STUDY = {run_folder.LOCK, run_folder.WORKERS, "format.json", "images.json", DIGESTS, WEIGHTS, "study.toml"}


def run(
    study: Study | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    display: Display | None = None,
    cache: Path | None = None,
) -> Result:
    """Run a study into the folder `out` (by default `runs/<method>-seed<n>`), or resume the one begun there.

    A study that was run to its end is not run again: its result is returned.
    """
    display = display or Display()
    study, folder = _study_and_folder(study, out, resume)
    finished = folder / "result.json"
    if resume and finished.exists():
        run_folder.check_whole(folder, "*")  # who is told that a run is finished may rely on its other files, too
        return Result(folder, run_folder.read_result(folder))
    check_place(folder)
    assembly = assemble(study, folder, display=display, cache=cache)
    with run_folder.run_lock(folder), threads(study.engine.threads), listening(display.working):
        durable = study.engine.durable
        run_folder.write_run_format(folder)
        # of a run that was killed just before its result was written
        (folder / run_folder.DIGESTS).unlink(missing_ok=True)
        check_same_images(folder, assembly.prepared.info["digests"], durable=durable)
        note_plugins(folder, study)
        if words := assembly.note_weights():
            display.noted(words)
        if study.data.volumes and device_of(study.engine.device) != "cpu":
            display.noted(memory_sentence(study, torch.cuda.mem_get_info()[0] / 1e9))
        atomic_write(folder / "study.toml", run_folder.with_own_digest(study.to_toml()), durable=durable)
        if study.engine.name == "nvflare":  # the coordinator, too, works in a process of NVFlare's
            from polyclinic.runner.run.nvflare_simulation import run_simulated

            values = run_simulated(assembly, display)
        else:
            engine = ray_engine(assembly) if study.engine.name == "ray" else in_process_engine(assembly)
            values = run_with(assembly, engine, display)
        if durable:  # what the result counts is on disk before the result is
            sync_files([*folder.glob("ledger/*.jsonl"), *folder.glob("cases/*.npz"), folder / "history.jsonl"])
        run_folder.write_result(folder, values, durable=durable)
    display.finished(values)
    return Result(folder, values)


def assemble(study: Study, folder: Path, *, display: Display | None = None, cache: Path | None = None) -> Assembly:
    """What carries the study out; BadInput for all that is known before work; nothing is written there."""
    device_of(study.engine.device)
    check_engine(study)
    if study.tuning is not None:
        study.tuning.check_weights()
    parts = prepare(study.data, study.sites, cache=cache, progress=(display or Display()).preparing)
    assembly = Assembly(study, parts, folder.resolve())
    assembly.check_site_names()
    assembly.unknown_classes  # noqa: B018 - a class or a site that there is not is said before anything is written
    if study.poisoning:
        study.poisoning.check(parts.names, len(parts.info["classes"]))
    assembly.initial_weights()  # a file of weights that does not fit is said before anything is written
    for backbone in (None, *assembly.backbones.values()):
        assembly.build_model(backbone)
    if study.privacy is not None:
        for site, counts in parts.info["counts"].items():
            check_budget(study.privacy, {site: counts["train"]}, study.optimizer.at_site(site).batch_size)
    return assembly


def _study_and_folder(study: Study | None, out: str | Path | None, resume: bool) -> tuple[Study, Path]:
    if study is None:
        if not resume or out is None:
            raise BadInput("study: give one, or the folder of a run to resume")
        study = load_run_study(Path(out))
    folder = Path(out) if out is not None else default_folder(study)
    begun = folder / "study.toml"
    if not resume:
        check_place(folder)
    if find_kit(folder):
        raise BadInput(f"--out {folder}: lies in a kit; `polyclinic deploy submit --resume` goes on with its runs")
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out {folder}: is a file; name a folder")
    if begun.exists() and not resume:
        ended = (folder / "result.json").is_file()
        to = "see its result" if ended else "continue it"
        held = "a run that has ended" if ended else "a run already"
        raise BadInput(f"--out {folder}: holds {held}; add --resume to {to}, or name another folder")
    left = {path.name.removesuffix(PARTIAL) for path in folder.iterdir()} if folder.is_dir() else set()
    if not begun.exists() and left - BEFORE_THE_STUDY:
        raise BadInput(f"--out {folder}: holds other files; name a new or empty folder")
    if begun.exists():
        # a plug-in file may have moved: it is read where this study says that it is now
        check_same(load_run_study(folder, moved=study.plugins), study, folder)
    return study, folder


def default_folder(study: Study) -> Path:
    """Where a run goes that names no folder."""
    return Path("runs") / f"{study.method.name}-seed{study.seed}"


def check_same(begun: Study, now: Study, folder: Path) -> None:
    """A run goes on with the study it was begun with; of the engine, only what changes no result may differ."""
    check_same_tables(begun, now, folder)
    load_checked(now.plugins, folder)  # a file may have moved, and must be the same


def check_same_tables(begun: Study, now: Study, folder: Path) -> None:
    """The same but for what lies in plug-ins."""
    before, after = begun.as_tables(), now.as_tables()
    if (
        "weights" in before["model"] and "weights" in after["model"]
    ):  # the file may have moved: `Assembly.weights_file` compares
        after["model"]["weights"] = before["model"]["weights"]
    for table in before | after:
        if table not in ("engine", "plugins", "logging") and before.get(table) != after.get(table):
            raise BadInput(
                f"{table}: differs from the study that {folder} was begun with; "
                "resume with that one, or name another folder"
            )
    for setting in ("threads", "device", "precision"):
        if before["engine"][setting] != after["engine"][setting]:
            raise BadInput(f"engine.{setting}: {folder} was begun with {before['engine'][setting]!r}; keep it")


def check_same_images(folder: Path, digests: Mapping[str, str], *, durable: bool = False) -> None:
    """A run goes on with the images it was begun with: note their digests, or BadInput if they are others now."""
    file = folder / "images.json"
    if not file.exists():
        if (folder / "checkpoint").exists():
            raise Damaged(f"{file}: is missing; bring it back from a copy, or run the study again into another folder")
        atomic_write(file, json.dumps(digests, indent=1) + "\n", durable=durable)
    elif read_json(file) != digests:
        raise BadInput(
            f"data: the images are not those that {folder} was begun with; bring them back, or name another folder"
        )


def run_with(assembly: Assembly, engine: Engine, display: Display) -> dict[str, Any]:
    """Run a study with an engine: writes the run folder but for `result.json`, whose content it returns."""
    study, folder, parts = assembly.study, assembly.folder, assembly.prepared
    trainer = assembly.trainer()
    recorder = Recorder(study, folder, has_local=bool(trainer.local_names), display=display)
    federation = Federation(assembly.federation_spec(trainer), engine, recorder)
    started = time.perf_counter()
    try:
        federation.resume()
        recorder.rewind_history(federation.round)
        if study.logging:
            from polyclinic.runner.run.loggers import Loggers

            recorder.loggers = Loggers(study, folder)
        display.started(study, parts.names, federation.round + 1)
        for sentence in advice.before(study, parts.info):
            federation.warn(sentence)
        last = run_method(study.method, federation)
        if chosen := recorder.watch.chosen(study):
            federation.warn(chosen)
        # before the final evaluation, so that a run killed in it evaluates again, and counts it once
        federation.save()
        models = released_models(federation, recorder, last)
        metrics = final_metrics(federation, assembly, models, bool(trainer.local_names))
        take_counts(metrics, parts.info, study.evaluation.final)
        if study.evaluation.final == "test":
            metrics |= study.method.more_metrics(federation, models)
        guessed = {} if has_noised_scores(study) else advice.guessed_scores(study, parts)
        for sentence in advice.after(study, guessed, metrics, federation.reports):
            federation.warn(sentence)
        calibrations: dict[str, Calibration] = {}
        looks = None
        if engine.simulation and not has_noised_scores(study):  # of a real site no score of a single image is kept
            final = study.evaluation.final
            with contextlib.suppress(BadInput):  # a model that says NaN, a plug-in's task that says no probabilities
                kept = keep_cases(assembly, models)
                metrics |= statistics_of_cases(kept[final], final) if final in kept else {}
            calibrations = calibrations_of(read_cases(folder, "validation"), models)
            looks = looks_of(open_site(parts.folder, site).validation.images for site in parts.names)
        elif not engine.simulation:
            own = whose_part(study, bool(trainer.local_names))
            federation.ask_all("keep_model", weights=models[""], own=own)
            ask_statistics(federation, study, models[""], own)
        if recorder.loggers:
            recorder.loggers.finish(metrics, federation.round)
    finally:
        if recorder.loggers:
            recorder.loggers.close()
        engine.close()
    tensors = flat(models)
    backbones = {site: assembly.backbones.get(site, study.model.backbone) for site in models}
    card = card_of(study, parts.info, backbones, digest_of_weights(tensors), calibrations, looks)
    content = model_file(tensors, card)
    atomic_write(folder / MODEL, content, durable=study.engine.durable)
    result = result_of(assembly, federation, recorder, models, metrics, started)
    known = {site: one.model_dump(mode="json") for site, one in calibrations.items()}
    result |= {"without_images": guessed} if guessed else {}
    return result | {"calibrations": known, "model_sha256": hashlib.sha256(content).hexdigest()}


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """A while in which torch computes with so many threads; its process keeps the memory that steps free."""
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
