"""The NVFlare engine: calls travel as bytes to sites in other processes, on this machine or at other institutions.

`engine.py` is the coordinator's end, `relay.py` a site's end, `job.py` a job of NVFlare's, `simulator.py` NVFlare's
simulator. They know federation, processes and NVFlare; they know no method and no study.
"""
