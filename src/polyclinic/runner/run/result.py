"""The result of a run: the content of `result.json`."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from polyclinic import __version__
from polyclinic.errors import BadInput
from polyclinic.federation.federation import Federation
from polyclinic.json_types import JsonObject, parse_json
from polyclinic.privacy.account import summary
from polyclinic.run_folder import check_whole
from polyclinic.runner.run import result_display
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.machine import device_of
from polyclinic.runner.run.recorder import Recorder
from polyclinic.runner.run.release import Models, _flat, digest_of_weights
from polyclinic.study import Study
from polyclinic.tasks import TASKS
from polyclinic.tasks.regression import IN_UNITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polyclinic.runner.predict.model_file import ReleasedModel
    from polyclinic.runner.predict.predict import Prediction

#: what a result says of its data, of `PreparedSites.info`
FACTS = ("source", "counts", "digests", "classes", "unit")


@dataclass(frozen=True, repr=False)
class Result:
    """What a run found: the content of `result.json`, and the folder it lies in."""

    folder: Path
    values: JsonObject

    @classmethod
    def open(cls, folder: str | Path) -> Result:
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

    def model(self, site: str | None = None, **code: Any) -> ReleasedModel:
        """The released model as a torch module: prepared uint8 images in, probabilities, values or masks out.

        Where each site has a model of its own, name the site. `code`: `plugins` and `allow_import` of
        `polyclinic.predict`, for a model that needs code from outside."""
        from polyclinic.runner.predict.predict import load_predictor  # here: a run predicts nothing

        return load_predictor(self.folder, site=site, **code).model

    def predict(self, images: str | Path | Iterable[str | Path], **settings: Any) -> list[Prediction]:
        """What the released model says about files and folders of images; settings are those of
        `polyclinic.predict`."""
        from polyclinic.runner.predict.predict import predict

        return predict(self.folder, [images] if isinstance(images, str | Path) else images, **settings)

    def plot(self, metric: str | None = None) -> Figure:
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
        about = f"{self.values['method']}, seed {self.values['seed']}, {len(per_site)} sites"
        return f"Result({about}; {images} images: {told}; {self.folder})"

    def _repr_html_(self) -> str:
        return result_display.as_html(self.values, self.folder)


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
        "weights_sha256": digest_of_weights(_flat(models)),
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
