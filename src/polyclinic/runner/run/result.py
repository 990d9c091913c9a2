"""The result of a run: which model is released, its test metrics, and the content of `result.json`."""

import functools
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from polyclinic import __version__
from polyclinic.errors import BadInput
from polyclinic.federation.call import Reply
from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.sums.coordinator_sums import ALL_SITES
from polyclinic.json_types import JsonMapping, JsonObject, parse_json
from polyclinic.privacy.account import summary
from polyclinic.run_folder import check_whole
from polyclinic.runner.predict.model_file import digest_of_weights
from polyclinic.runner.run import result_display
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.machine import device_of
from polyclinic.runner.run.method import has_noised_scores
from polyclinic.runner.run.recorder import Recorder, mean_of, score
from polyclinic.study import Study
from polyclinic.tasks import TASKS
from polyclinic.tasks.regression import IN_UNITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polyclinic.runner.predict.model_file import ReleasedModel
    from polyclinic.runner.predict.predict import Prediction

#: models by the site they belong to; one model for all sites stands under ""
Models = dict[str, dict[str, Tensor]]
#: what a result says of its data, of `PreparedSites.info`
FACTS = ("source", "counts", "digests", "classes", "unit")


@dataclass(frozen=True, repr=False)
class Result:
    """What a run found: the content of `result.json`, and the folder it lies in."""

    folder: Path
    values: JsonObject

    @classmethod
    def open(cls, folder: str | Path) -> "Result":
        """The result of a finished run; BadInput if the folder holds none."""
        folder = Path(folder)
        check_whole(folder)
        try:
            values = parse_json((folder / "result.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BadInput(f"{folder}: holds no result.json; name the folder of a finished run") from None
        except (OSError, ValueError):
            raise BadInput(f"{folder / 'result.json'}: is damaged; run the study again, or fetch it again") from None
        if not isinstance(values, dict) or "metrics" not in values:
            raise BadInput(f"{folder / 'result.json'}: is no result of a run; name the folder of a finished run")
        return cls(folder, values)

    @property
    def metrics(self) -> JsonObject:
        """`test` (pooled), `mean` (over sites) and `per_site`."""
        return self.values["metrics"]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def weights(self) -> dict[str, Tensor]:
        """The released model; where each site has a model of its own, names begin with the site's."""
        return load_file(self.folder / "model.safetensors")

    @property
    def history(self) -> Any:
        """A row for each round: seconds, bytes so far, validation metrics of all sites together and of each site.

        A pandas DataFrame where pandas is installed, else a list of dicts."""
        rows = result_display.history_rows(self.folder / "history.jsonl")
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def model(self, site: str | None = None, **code: Any) -> "ReleasedModel":
        """The released model as a torch module: prepared uint8 images in, probabilities, values or masks out.

        Where each site has a model of its own, name the site. `code`: `plugins` and `allow_import` of
        `polyclinic.predict`, for a model that needs code from outside."""
        from polyclinic.runner.predict.predict import load_predictor  # here: a run predicts nothing

        return load_predictor(self.folder, site=site, **code).model

    def predict(self, images: str | Path | Iterable[str | Path], **settings: Any) -> "list[Prediction]":
        """What the released model says about files and folders of images; settings are those of
        `polyclinic.predict`."""
        from polyclinic.runner.predict.predict import predict

        return predict(self.folder, [images] if isinstance(images, str | Path) else images, **settings)

    def plot(self, metric: str | None = None) -> "Figure":
        """Learning curves, and the released model at each site, as a matplotlib figure; by default of the task's own
        metric."""
        images, scores, _ = result_display.final_scores(self.values)
        task = self.values["task"]
        own = TASKS[task].metric if task in TASKS else ""  # of a plug-in's task, which may be unknown here, the first
        chosen = metric or (own if own in scores else next(iter(scores)))
        if chosen not in scores:
            raise BadInput(f"metric '{chosen}': is not among {', '.join(scores)} of this run's {images} images")
        rows = result_display.history_rows(self.folder / "history.jsonl")
        unit = self.values["data"].get("unit", "") if chosen in IN_UNITS else ""
        return result_display.draw(self.values, rows, chosen, unit)

    def __repr__(self) -> str:
        images, scores, per_site = result_display.final_scores(self.values)
        told = ", ".join(f"{name} {value:.3f}" for name, value in scores.items() if name != "loss")
        sites = len(per_site) or len(self.values["communication"].get("per_site", {}))
        about = f"{self.values['method']}, seed {self.values['seed']}, {sites} sites"
        return f"Result({about}; {images} images: {told}; {self.folder})"

    def _repr_html_(self) -> str:
        return result_display.as_html(self.values, self.folder)


# --- the released model and its test metrics -----------------------------------------------------------


def released_models(federation: Federation, recorder: Recorder, last: Weights) -> Models:
    """The selected model: one for all sites, or where a part of it stays at the sites, one of each site."""
    selected = {name: tensor.cpu() for name, tensor in (recorder.best_weights or last).items()}
    if not recorder.has_local or not federation.engine.simulation:  # what stays at a real site nobody else sees
        return {"": dict(selected)}
    group = "best" if recorder.best_round else "local"
    common = {**federation.trainer.initial_local, **selected}
    states = {site: federation.simulated_state(site) for site in federation.sites}
    own = {site: state.group(group) or state.group("local") for site, state in states.items()}  # kept at the sites
    # a site that keeps all of its model may have another network than the coordinator
    return {site: part if part and not selected else common | part for site, part in own.items()}


#: what scores are of where each site has a model of its own
OF_ALL = "mean over the sites' models, each on the images of all sites"
OF_OWN = "all images together, each judged by its own site's model only"


def judged(assembly: Assembly, model: Mapping[str, Tensor], split: str) -> list[Reply]:
    """What each simulated site would say of a model: the simulator looks, where sites let out nothing but sums."""
    found, trainer_of, opened = [], functools.cache(assembly.trainer), assembly.open_images()
    for site in assembly.prepared.names:
        trainer, part = trainer_of(assembly.backbones.get(site)), getattr(opened(site), split)
        if len(part):
            trainer.load(model)
            found.append(Reply(site, (Parcel("metrics", trainer.evaluate(part)),)))
    return found


def final_metrics(federation: Federation, assembly: Assembly, models: Models, personal: bool) -> JsonObject:
    """Metrics of the released models on test images, computed once. Where each site has a model of its own, `test` is
    the mean over the models, each on the images of all sites, and `per_site` is each site's model on its own images.

    With `evaluation.final = "validation"` the same on validation images, as `validation`; nothing is tested. With
    "none" no site is asked.
    """
    study, simulated = assembly.study, federation.engine.simulation
    split = study.evaluation.final
    if split == "none":
        return _tables("test", {"pooled": {}, "mean": {}, "per_site": {}})
    if "" in models:
        part = whose_part(study, personal)
        replies = federation.ask_scores(models[""], split, final=True, own=part)
        if simulated and (federation.adds_scores or study.policy.scores == "coarse"):
            replies = judged(assembly, models[""], split)
        tables = _tables(split, score(study.task, replies) or {"pooled": {}, "mean": {}, "per_site": {}})
        if simulated or has_noised_scores(study):
            return tables
        from polyclinic.runner.evaluate.rounded_scores import intervals_of_cells, rounding_intervals

        sums = {reply.site: dict(reply.metrics) for reply in replies if reply.parcels and reply.metrics}
        if federation.adds_scores:
            found = intervals_of_cells(study.task, sums[ALL_SITES]) if sums else {}
            return {**tables, **({"rounding": {"split": split, **found}} if found else {})}
        found = rounding_intervals(study.task, federation.trainer.target, sums)
        if found:
            return {**tables, "rounding": {"split": split, **found}}
        counts = {s: one["confusion"].sum(1).tolist() for s, one in sums.items() if "confusion" in one}
        return {**tables, "class_counts": counts}
    of_model = {}
    for site, weights in models.items():
        if federation.adds_scores or study.policy.scores == "coarse":
            replies = judged(assembly, weights, split)
        else:
            replies = federation.ask_all("evaluate", counted=False, weights=weights, split=split, own="none")
        of_model[site] = score(study.task, replies) or {"pooled": {}, "per_site": {}}
    own = {site: scored["per_site"].get(site, {}) for site, scored in of_model.items()}
    table = {"pooled": mean_of([s["pooled"] for s in of_model.values()]), "mean": mean_of(list(own.values()))}
    basis = {split: OF_ALL, "intervals.pooled": OF_OWN}
    tables = {**_tables(split, {**table, "per_site": own}), "models_judged": basis}
    if split == "validation":
        return tables
    across = {site: scored["per_site"] for site, scored in of_model.items()}
    return {**tables, "across_sites": across, "convergence": convergence(across)}


def take_counts(metrics: JsonObject, info: JsonObject, split: str) -> None:
    """Move the images of each class that deployed sites told with exact scores to the facts about the images."""
    for site, of_class in metrics.pop("class_counts", {}).items():
        info["class_counts"][site] = {split: of_class}
        info["counts"][site] = {split: sum(of_class)}


def whose_part(study: Study, personal: bool) -> str:
    """Which part of its own a site adds to the released model: none, or the best round's or the last one's."""
    return "none" if not personal else "best" if study.evaluation.select == "best" else "current"


def convergence(across: Mapping[str, Mapping[str, Mapping[str, float]]]) -> JsonObject:
    """How far the sites' models agree: for the images of each site and each metric, mean and standard deviation over
    the models (`across`: by model, by site of the images, by metric)."""
    found: JsonObject = {}
    for site in across:
        scores = [of_model[site] for of_model in across.values() if site in of_model]
        names = sorted({name for one in scores for name in one})
        values = {name: [one[name] for one in scores if name in one] for name in names}
        found[site] = {name: {"mean": mean(some), "std": stdev(some)} for name, some in values.items() if some[1:]}
    return found


def _tables(split: str, scored: JsonMapping) -> JsonObject:
    if split == "validation":
        return {"test": {}, "mean": {}, "per_site": {}, "validation": dict(scored)}
    return {"test": scored["pooled"], "mean": scored["mean"], "per_site": scored["per_site"]}


def flat(models: Models) -> dict[str, Tensor]:
    named = {f"{site}/{n}" if site else n: t for site, model in models.items() for n, t in model.items()}
    return {name: tensor.contiguous().clone() for name, tensor in named.items()}


# --- what is written ----------------------------------------------------------------------------------


def result_of(
    assembly: Assembly, federation: Federation, recorder: Recorder, models: Models, metrics: JsonObject, started: float
) -> JsonObject:
    """The content of `result.json`; `started`: when the run began, by `time.perf_counter`."""
    study, parts = assembly.study, assembly.prepared
    return {
        "method": study.method.name,
        "seed": study.seed,
        "task": study.task.name,
        "metrics": metrics,
        "model": "one of each site" if "" not in models else "one for all sites",
        "selected": {"by": study.evaluation.select, "round": recorder.best_round or federation.round},
        "batch_norm": "local" if study.method.traits.batch_norm == "local" else study.model.batch_norm,
        "heterogeneity": {
            name: parts.info[name] for name in ("mean_ks", "pairwise_ks", "labels") if name in parts.info
        },
        "communication": federation.communication.summary(federation.sites),
        "privacy": summary(federation.coverage.records, federation.coverage.uncovered),
        "rounds": federation.round,
        "failures": federation.failures,
        "ledgers": federation.heads.summary(),
        **federation.reports,
        "data": {key: parts.info[key] for key in FACTS if key in parts.info},
        "timing": {
            "seconds": round(time.perf_counter() - started, 3),
            "rounds_seconds": round(recorder.seconds, 3),
        },
        "environment": environment(study, federation),
        "weights_sha256": digest_of_weights(flat(models)),
    }


def environment(study: Study, federation: Federation) -> JsonObject:
    """What the result's last bits depend on: versions, the machine, and how steps were computed."""
    device = device_of(study.engine.device)
    return {
        "polyclinic": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
        "threads": study.engine.threads,
        "recorded_steps": federation.trainer.graphs,
        "weights_stay_on": federation.weights_device,
        "stacked": sorted(getattr(federation.engine, "stacked_operations", ())),
    }
