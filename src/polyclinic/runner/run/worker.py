"""A worker process: `python -m polyclinic.runner.run.worker`. Started by an engine, not by hand."""

import json
from pathlib import Path

from polyclinic.engines.worker_process import read_spec, serve
from polyclinic.run_folder import worker_lock
from polyclinic.runner.run.assembly import host_from

if __name__ == "__main__":
    spec = read_spec()
    with worker_lock(Path(json.loads(spec)["folder"])):
        serve(lambda: host_from(spec))
