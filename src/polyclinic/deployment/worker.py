"""What the worker process of a deployed site runs: `python -m polyclinic.deployment.worker ORDER`."""

import json
import sys

from polyclinic.deployment.deployed_site import deployed_host, discreet
from polyclinic.engines.worker_process import serve

if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    serve(lambda: deployed_host(told), discreet(told["kit"]))
