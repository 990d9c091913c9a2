"""The worker process of a deployed site: `python -m polyclinic.deployment.worker WORKER_SPEC`."""

import json
import sys

from polyclinic.deployment.deployed_site import deployed_host, discreet
from polyclinic.engines.worker_process import serve

if __name__ == "__main__":
    worker_spec = json.loads(sys.argv[1])
    serve(lambda: deployed_host(worker_spec), discreet(worker_spec["kit"]))
