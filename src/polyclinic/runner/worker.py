"""What a worker process runs: `python -m polyclinic.runner.worker ORDER`. Started by an engine, not by hand."""

import json
import sys

from polyclinic.engines.worker_process import serve
from polyclinic.runner.assembly import host_from

if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    if "kit" in told:  # at a real institution
        from polyclinic.deployment.at_site import deployed_host, discreet

        serve(lambda: deployed_host(told), discreet(told["kit"]))
    else:
        serve(lambda: host_from(sys.argv[1]))
