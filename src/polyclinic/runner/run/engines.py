"""The engines of a run on this machine or on a cluster, made from the study's settings."""

from polyclinic.engines.in_process import InProcess
from polyclinic.engines.worker_process import WorkerProcess, python_command
from polyclinic.errors import BadInput
from polyclinic.federation.collaborators import Engine
from polyclinic.runner.run.assembly import Assembly, host_from
from polyclinic.runner.run.machine import device_of
from polyclinic.study import Study
from polyclinic.study.reading import unknown_elsewhere


def in_process_engine(assembly: Assembly) -> Engine:
    """Sites in this process, or in worker processes."""
    settings = assembly.study.engine

    def start_worker() -> WorkerProcess:
        command = python_command("polyclinic.runner.run.worker")
        return WorkerProcess(command, threads=settings.threads, spec=assembly.worker_spec)

    on_cpu = device_of(settings.device) == "cpu"
    stacked = settings.stacked == "always" or (settings.stacked == "auto" and not on_cpu and not settings.reproducible)
    return InProcess(
        assembly.host(),
        assembly.prepared.names,
        start_worker,
        workers=settings.workers,
        threads=settings.threads,
        deadline=settings.deadline,
        # processes on one GPU only get in each other's way, sites in other processes do not stack, and what was put
        # into a registry by hand is known here only
        may_grow=on_cpu and not stacked and unknown_elsewhere(assembly.study) is None,
        stacked=stacked,
    )


def ray_engine(assembly: Assembly) -> Engine:
    """Sites in actors of Ray."""
    from polyclinic.engines.ray import Ray, Share

    settings = assembly.study.engine
    usual = 0.0 if device_of(settings.device) == "cpu" else 0.25  # of a GPU, while a site works
    gpus = settings.gpus if settings.gpus is not None else usual
    return Ray(
        assembly.prepared.names,
        host_from,
        assembly.worker_spec,
        assembly.folder,
        share=Share(settings.workers, settings.threads, gpus),
        address=settings.address,
        deadline=settings.deadline,
    )


def check_engine(study: Study) -> None:
    """BadInput before a run if it needs other processes, and has something that they cannot find."""
    problem, settings = unknown_elsewhere(study), study.engine
    elsewhere = settings.name != "in-process" or settings.deadline is not None or settings.workers not in (1, "auto")
    if problem and elsewhere:
        raise BadInput(problem)
