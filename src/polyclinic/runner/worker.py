"""A worker process: `python -m polyclinic.runner.worker WORKER_SPEC`. Started by an engine, not by hand."""

import json
import sys
from pathlib import Path

from polyclinic.engines.worker_process import serve
from polyclinic.runner.assembly import host_from
from polyclinic.runner.folder_lock import worker_lock

if __name__ == "__main__":
    with worker_lock(Path(json.loads(sys.argv[1])["folder"])):
        serve(lambda: host_from(sys.argv[1]))
