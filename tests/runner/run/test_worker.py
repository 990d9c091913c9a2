"""What a worker process imports: every worker, actor and command pays for it, so only what every run needs."""

import subprocess
import sys

HEAVY = ("matplotlib", "nibabel", "pydicom", "opacus", "monai", "ray", "nvflare", "scipy")
PROGRAM = f"""
import sys
import polyclinic.runner.run.worker
print(*[name for name in {HEAVY} if name in sys.modules])
"""


def test_a_worker_imports_nothing_that_most_runs_do_without():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
