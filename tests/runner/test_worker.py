"""What a worker process imports: every worker, actor and command pays for it, so only what every run needs."""

import subprocess
import sys

HEAVY = ("matplotlib", "nibabel", "pydicom", "opacus", "monai", "ray", "nvflare", "scipy", "torch._dynamo")


def test_a_worker_imports_nothing_that_most_runs_do_without():
    code = f"import sys, polyclinic.runner.worker; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
