"""What a worker process runs: `python -m polyclinic.runner.worker ORDER`. Started by an engine, not by hand."""

import sys

from polyclinic.engines.worker_process import serve
from polyclinic.runner.assembly import host_from

if __name__ == "__main__":
    serve(lambda: host_from(sys.argv[1]))
