"""The worker process of a deployed site: `python -m polyclinic.deployment.worker`, its spec on standard input."""

import contextlib
import json
import os

from polyclinic.deployment.deployed_site import deployed_host, discreet, held_run
from polyclinic.engines.worker_process import read_spec, serve
from polyclinic.federation.host import SiteHost


def main() -> None:
    os.umask(0o077)  # what a site writes is for its own people only
    worker_spec = json.loads(read_spec())
    with contextlib.ExitStack() as held:

        def make_host() -> SiteHost:
            held.enter_context(held_run(worker_spec))
            return deployed_host(worker_spec)

        serve(make_host, discreet(worker_spec["kit"]))


if __name__ == "__main__":
    main()
