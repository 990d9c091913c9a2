"""What a worker process runs: `python -m polyclinic.worker ORDER`. Started by an engine, not by hand."""

import sys

from polyclinic.assembly import host_from
from polyclinic.engines.worker_process import serve

if __name__ == "__main__":
    serve(host_from(sys.argv[1]))
