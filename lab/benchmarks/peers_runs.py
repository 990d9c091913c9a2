"""FedAvg of one job by one program, for `peers.py`: python peers_runs.py PROGRAM JOB.npz ROUNDS WEIGHTS.npz

It runs in the program's own environment, so nothing of Polyclinic is imported. The job holds the images and labels of
each site and the first weights. Every site trains with `train`, where a program lets it; pfl-research and FedLab
train with loops of their own, which take as many steps of the same size. Weights after the last round are written.

With `-` for ROUNDS it reads numbers of rounds from its input, line by line, and says what each run took (`serve`).
"""

import contextlib
import glob
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, RATE = 32, 0.01
#: set by `peers.py --device cuda`: images and networks lie on the GPU, and passes compute in bfloat16, as ours do there
DEVICE = torch.device(os.environ.get("PEERS_DEVICE", "cpu"))
Weights = dict[str, Tensor]


class Network(nn.Sequential):
    """The backbone small-cnn with group norm, layer by layer."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        for number, (inputs, width) in enumerate(((channels, 32), (32, 64), (64, 64)), 1):
            self.add_module(f"conv{number}", nn.Conv2d(inputs, width, 3, padding=1, bias=False))
            self.add_module(f"norm{number}", nn.GroupNorm(16, width))
            self.add_module(f"relu{number}", nn.ReLU())
            if number < 3:
                self.add_module(f"pool{number}", nn.MaxPool2d(2))
        for name, layer in (("avgpool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten())):
            self.add_module(name, layer)
        self.add_module("fc", nn.Linear(64, outputs))

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """As pfl-research asks for it."""
        with half_precision():
            output = self(as_input(images))
        return F.cross_entropy(output.float(), labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        return {}


def half_precision() -> contextlib.AbstractContextManager:
    return torch.autocast("cuda", torch.bfloat16) if DEVICE.type == "cuda" else contextlib.nullcontext()


def as_input(images: Tensor) -> Tensor:
    return images.float() / 255


class Job:
    """Images uint8 [n, C, H, W] and labels of each site, and the first weights."""

    def __init__(self, file: str) -> None:
        held = np.load(file, allow_pickle=False)
        self.sites = int(held["sites"])
        self.images = [torch.from_numpy(held[f"images/{site}"]).to(DEVICE) for site in range(self.sites)]
        self.labels = [torch.from_numpy(held[f"labels/{site}"]).to(DEVICE) for site in range(self.sites)]
        names = [name for name in held.files if name.startswith("weights/")]
        self.weights = {name.removeprefix("weights/"): torch.from_numpy(held[name]).to(DEVICE) for name in names}

    def network(self) -> Network:
        made = Network(self.images[0].shape[1], len(self.weights["fc.bias"]))
        made.load_state_dict(self.weights)
        return made.to(DEVICE)

    def train(self, network: Network, weights: Weights, site: int, number: int) -> Weights:
        """An epoch of a site in a round."""
        network.load_state_dict(weights)
        network.train()
        optimizer = torch.optim.SGD(network.parameters(), RATE)
        order = torch.randperm(len(self.images[site]), generator=torch.Generator().manual_seed(1000 * number + site))
        for index in order.split(BATCH):
            optimizer.zero_grad(set_to_none=True)
            network.loss(self.images[site][index], self.labels[site][index]).backward()
            optimizer.step()
        return {name: one.detach().clone() for name, one in network.state_dict().items()}


def bare(job: Job, rounds: int) -> Weights:
    network, weights = job.network(), job.weights
    for number in range(1, rounds + 1):
        trained = [job.train(network, weights, site, number) for site in range(job.sites)]
        weights = {name: torch.stack([one[name] for one in trained]).mean(0) for name in weights}
    return weights


def pfl(job: Job, rounds: int) -> Weights:
    """pfl-research; it shuffles by itself, and trains with its own loop."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    def of_site(site: int) -> Dataset:
        order = torch.randperm(len(job.images[site]))
        return Dataset([job.images[site][order], job.labels[site][order]])

    network = job.network()
    data = FederatedDataset(of_site, get_user_sampler("minimize_reuse", list(range(job.sites))))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    params = NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=job.sites, val_cohort_size=0
    )
    training = NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=RATE)
    FederatedAveraging().run(params, SimulatedBackend(data, data), model, training, send_metrics_to_platform=False)
    return network.state_dict()


def fedlab(job: Job, rounds: int) -> Weights:
    """FedLab in one process, with its own loop over batches."""
    sys.modules["torchvision"] = _Absent("torchvision")  # only its ready-made data sets need it
    for name in ("transforms", "datasets", "datasets.utils", "datasets.folder", "transforms.functional"):
        sys.modules[f"torchvision.{name}"] = _Absent(name)
    from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
    from fedlab.contrib.algorithm.basic_server import SyncServerHandler
    from fedlab.core.standalone import StandalonePipeline

    class Shuffled:
        """A site's batches in another order at every call."""

        def get_dataloader(self, site: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
            for index in torch.randperm(len(job.images[site])).split(batch):
                yield as_input(job.images[site][index]), job.labels[site][index]

    trainer = SGDSerialClientTrainer(job.network(), job.sites)
    trainer.setup_dataset(Shuffled())
    trainer.setup_optim(1, BATCH, RATE)
    handler = SyncServerHandler(job.network(), rounds, 1.0)
    pipeline = StandalonePipeline(handler, trainer)
    pipeline.evaluate = lambda: None
    pipeline.main()
    return handler.model.state_dict()


class _Absent(type(sys)):  # type: ignore[misc]
    """A module whose every name is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def flower(job: Job, rounds: int) -> Weights:
    """Flower's simulation: Ray starts a worker for each core, and each keeps a network."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    site_app, server, found, file = ClientApp(), ServerApp(), {}, sys.argv[2]

    @site_app.train()
    def train(message: Message, context: Context) -> Message:
        here = _kept(file)
        site, number = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
        network = here.network()
        trained = here.train(network, message.content["arrays"].to_torch_state_dict(), site, number)
        content = {"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": len(here.images[site])})}
        return Message(content=RecordDict(content), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=job.sites, min_available_nodes=job.sites)
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(job.weights), num_rounds=rounds)
        found.update(result.arrays.to_torch_state_dict())

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, site_app, num_supernodes=job.sites, backend_config=resources)
    return found


_JOBS: dict[str, Job] = {}


def _kept(file: str) -> Job:
    """A job is read once in a process."""
    if file not in _JOBS:
        _JOBS[file] = Job(file)
    return _JOBS[file]


def nvflare(job: Job, rounds: int) -> Weights:
    """NVFlare's simulator as it comes: a process for each site, which stays."""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    shape = {"channels": job.images[0].shape[1], "outputs": len(job.weights["fc.bias"])}
    with tempfile.TemporaryDirectory() as folder:
        first = f"{folder}/first.pt"
        torch.save({"model": job.weights}, first)
        recipe = FedAvgRecipe(
            min_clients=job.sites,
            num_rounds=rounds,
            model={"class_path": "peers_runs.Network", "args": shape},
            initial_ckpt=first,
            train_script=__file__,
            train_args=f"nvflare-site {sys.argv[2]} {rounds} -",
            key_metric="",
        )
        recipe.execute(SimEnv(num_clients=job.sites, workspace_root=folder))
        files = glob.glob(f"{folder}/**/FL_global_model.pt", recursive=True)
        saved = torch.load(files[0], weights_only=True)
    return saved["model"]


def nvflare_site(job: Job, rounds: int) -> None:
    """What a site runs in NVFlare's simulator."""
    import nvflare.client as flare

    flare.init()
    site, network = int(flare.get_site_name().split("-")[-1]) - 1, job.network()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        weights = {name: torch.as_tensor(one) for name, one in received.params.items()}
        trained = job.train(network, weights, site, received.current_round + 1)
        flare.send(flare.FLModel(params=trained))


PROGRAMS: dict[str, Callable[[Job, int], Weights]] = {
    "bare": bare,
    "pfl": pfl,
    "fedlab": fedlab,
    "flower": flower,
    "nvflare": nvflare,
}


#: what a line of `serve` begins with; programs may print other lines
TIMED = "TIMED "


def serve(work: Callable[[int], Weights], out: str) -> None:
    """Runs of so many rounds as the lines of the input say; seconds of each, and the weights of the last."""
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        held = {name: one.detach().cpu().numpy() for name, one in work(int(line)).items()}
        took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        np.savez(out, **held)
        print(TIMED + json.dumps(took), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    program, file, rounds, out = sys.argv[1:]
    if program == "nvflare-site":
        nvflare_site(Job(file), int(rounds))
        return
    job = Job(file)
    if rounds == "-":
        serve(lambda count: PROGRAMS[program](job, count), out)
        os._exit(0)
    weights = PROGRAMS[program](job, int(rounds))
    np.savez(out, **{name: one.detach().cpu().numpy() for name, one in weights.items()})
    os._exit(0)  # what a program leaves running is none of the measurement


if __name__ == "__main__":
    main()
