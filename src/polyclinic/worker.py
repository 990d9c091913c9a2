"""What a worker process runs: `python -m polyclinic.worker ORDER`. Started by the in-process engine, not by hand."""

import sys

import torch

from polyclinic.assembly import assemble_from
from polyclinic.engines.worker_process import serve

if __name__ == "__main__":
    assembly = assemble_from(sys.argv[1])
    torch.set_num_threads(assembly.study.engine.threads)
    serve(assembly.host())
