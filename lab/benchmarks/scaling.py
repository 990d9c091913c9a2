"""How time and memory grow with the number of sites, at the same number of images per site.

Each point is a process of its own, with one thread and no worker processes. `peak` is the most memory that process
ever held (VmHWM); `added` is what the rounds added to what it held before the first one; `folder` is what lies on disk
in the run folder after the rounds. The final test is left out. `--sampled` has 1,000 and 10,000 sites of which 100 take
part in a round (`method.fraction`).
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measuring import finish, flags, noise_images

COUNTS = (4, 16, 64, 256)
SAMPLED_COUNTS = (1000, 10_000)
#: sites of a round where a share of them is drawn
IN_A_ROUND = 100
QUICK_COUNTS = (4, 16, 64)
ROUNDS = 3
IMAGES_PER_SITE = 8
MIB = 2**20


@dataclass(frozen=True)
class Series:
    """A method and a network, to be run with more and more sites."""

    method: str
    backbone: str
    why: str
    sampled: bool = False

    def in_a_round(self, sites: int) -> int:
        return min(sites, IN_A_ROUND) if self.sampled else sites

    @property
    def name(self) -> str:
        return f"{self.method}/{self.backbone}"


SERIES = (
    Series("fedavg", "small-cnn", "a small model that all sites share: the cost of having sites"),
    Series("fedavg", "resnet18", "a model of 45 MB that comes back from every site"),
    Series("standalone", "resnet18", "a model of 45 MB that stays at every site"),
)
SAMPLED = (Series("fedavg", "small-cnn", f"{IN_A_ROUND} sites a round, drawn from many", sampled=True),)


def measure_here(series: Series, sites: int, run_folder: Path, cache: Path) -> dict[str, Any]:
    """Run the rounds in this process, whose peak of memory is then the point's."""
    import torch

    from polyclinic.runner.run.recorder import Display
    from polyclinic.runner.run.run import run
    from polyclinic.study import Study

    torch.set_num_threads(1)

    class Finished(Exception):  # noqa: N818
        """The last round is done."""

    class Watch(Display):
        stamps: list[float] = []  # noqa: RUF012
        before = 0

        def started(self, *_: Any) -> None:
            self.before = memory("VmRSS")
            self.stamps.append(time.perf_counter())

        def round_done(self, line: Mapping[str, Any], rounds: int) -> None:
            self.stamps.append(time.perf_counter())
            if line["round"] == rounds:
                raise Finished

    watch = Watch()
    with contextlib.suppress(Finished):
        run(Study(**study_tables(series, sites)), run_folder, display=watch, cache=cache)
    seconds = [end - start for start, end in zip(watch.stamps, watch.stamps[1:], strict=False)]
    return figures_of(series, sites, seconds, watch.before) | folder_figures(run_folder, sites)


def study_tables(series: Series, sites: int) -> dict[str, Any]:
    images = sites * (IMAGES_PER_SITE + 1)
    return {
        "data": data_of(series, images) | {"validation": 0.0, "test": sites / images},
        "sites": {"partition": "iid", "count": sites},
        "model": {"backbone": series.backbone},
        "optimizer": {"batch_size": IMAGES_PER_SITE},
        "method": {"name": series.method, "rounds": ROUNDS, "fraction": series.in_a_round(sites) / sites},
        "evaluation": {"every": 0},
        "engine": {"workers": 1, "threads": 1, "device": "cpu"},
    }


def data_of(series: Series, images: int) -> dict[str, Any]:
    """Phantoms; of ninety thousand images, which would take long to draw, noise."""
    if series.sampled:
        return noise_images(Path(tempfile.gettempdir()), images, 32)
    return {"source": "fundus-phantom", "size": 32, "samples": images}


def folder_figures(folder: Path, sites: int) -> dict[str, Any]:
    """What the run folder holds, in all and for each site of the study."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return {
        "folder_mib": round(size / MIB, 2),
        "folder_bytes_per_site": round(size / sites),
        "files": len(files),
    }


def figures_of(series: Series, sites: int, seconds: list[float], before: int) -> dict[str, Any]:
    per_round = statistics.median(seconds)
    peak = memory("VmHWM")
    return {
        "method": series.method,
        "backbone": series.backbone,
        "sites": sites,
        "seconds_per_round": round(per_round, 3),
        "ms_per_site_and_round": round(1000 * per_round / series.in_a_round(sites), 2),
        "peak_mib": round(peak / MIB, 1),
        "added_mib": round((peak - before) / MIB, 1),
    }


def memory(field: str) -> int:
    """Bytes of this process that Linux keeps under `field` (VmRSS: now; VmHWM: at the peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def measure(series: Series, sites: int, cache: Path) -> dict[str, Any]:
    prepare_data(series, sites, cache)
    with tempfile.TemporaryDirectory() as folder:
        order = json.dumps({"series": asdict(series), "sites": sites, "folder": folder, "cache": str(cache)})
        command = [sys.executable, __file__, "--point", order]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{series.method} with {sites} sites failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def prepare_data(series: Series, sites: int, cache: Path) -> None:
    """Draw the images here, so that drawing them is no part of a point's peak."""
    from polyclinic.data.parts import prepare
    from polyclinic.study import Study

    study = Study(**study_tables(series, sites))
    prepare(study.data, study.sites, cache=cache)


def main() -> None:
    options = arguments()
    if options.point:
        order = json.loads(options.point)
        run_folder, cache = Path(order["folder"]) / "run", Path(order["cache"])
        print(json.dumps(measure_here(Series(**order["series"]), order["sites"], run_folder, cache)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as shared:
        chosen = SAMPLED if options.sampled else [one for one in SERIES if options.series in (None, one.name)]
        usual = SAMPLED_COUNTS if options.sampled else COUNTS
        for series in chosen:
            print(f"{series.method}, {series.backbone}: {series.why}")
            for sites in options.sites or (QUICK_COUNTS if options.quick else usual):
                rows.append(measure(series, sites, Path(shared)))
                show(rows[-1])
    figures = {"benchmark": "scaling", "quick": options.quick, "points": rows}
    finish(figures, options)


def arguments() -> argparse.Namespace:
    parser = flags(__doc__, f"only {QUICK_COUNTS} sites")
    parser.add_argument("--sites", type=int, nargs="+", help=f"numbers of sites, instead of {COUNTS}")
    parser.add_argument("--series", choices=[series.name for series in SERIES], help="only this one")
    parser.add_argument("--sampled", action="store_true", help=f"{SAMPLED_COUNTS} sites, {IN_A_ROUND} in a round")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    return parser.parse_args()


def show(row: Mapping[str, Any]) -> None:
    print(
        f"  {row['sites']:>4} sites  {row['seconds_per_round']:>8.2f} s a round  "
        f"{row['ms_per_site_and_round']:>7.1f} ms a site and round  "
        f"peak {row['peak_mib']:>7.0f} MiB ({row['added_mib']:+.0f})  folder {row['folder_mib']:.1f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
