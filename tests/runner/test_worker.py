"""What a worker process imports: every worker, actor and command pays for it, so only what every run needs."""

import subprocess
import sys

HEAVY = ("matplotlib", "nibabel", "pydicom", "opacus", "monai", "ray", "nvflare", "scipy", "torch._dynamo")

#: the imports, and a step of each optimiser that a study can name
PROGRAM = f"""
import sys
import torch
import polyclinic.runner.worker
from polyclinic.training.optimizer import Optimizer
for name in ("sgd", "adam", "adamw"):
    model = torch.nn.Linear(2, 2)
    optimizer = Optimizer(name=name).make(model.parameters(), 1)
    optimizer.zero_grad()
    model.weight.sum().backward()
    optimizer.step()
print(*[name for name in {HEAVY} if name in sys.modules])
"""


def test_a_worker_imports_nothing_that_most_runs_do_without():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
