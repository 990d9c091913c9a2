"""Digests of what draws random numbers: a short run of every method, generators, partitions, phantoms, attacks.

    python tests/recorded_digests.py [GROUP ...]    prints them as JSON
    python tests/recorded_digests.py --write        records them in tests/recorded_digests.json

Whoever moves code without meaning to change a result finds here that no bit has changed. Run as a program of its own:
the last bits of floating-point arithmetic depend on the processor, unless its libraries are told not to use what only
some have, and they can be told before they are loaded only (`ENVIRONMENT`).
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_suffix(".json")
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Nehalem",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}
Tables = dict[str, dict[str, Any]]
# --- runs: studies in plain tables ---------------------------------------------------------------------
BASE: Tables = {
    "data": {"source": "fundus-phantom", "size": 28, "samples": 48, "validation": 0.2, "test": 0.2},
    "sites": {"partition": "iid", "count": 2},
    "model": {"backbone": "lenet5"},
    "optimizer": {"lr": 0.05, "batch_size": 4},
    "evaluation": {"every": 0, "select": "last", "final": "none"},
    "engine": {"workers": 1, "device": "cpu", "durable": False},  # nobody loses power
}
VQVAE2 = {
    **{"name": "vqvae2", "epochs": 1, "batch_size": 4, "width": 8, "blocks": 1, "top_codes": 8, "bottom_codes": 8},
    **{"prior_epochs": 1, "prior_batch_size": 4, "prior_width": 8, "prior_layers": 1},
}
DCGAN = {"name": "dcgan", "width": 4, "latent": 8, "steps": 2}
STYLEGAN2 = {"name": "stylegan2", "width": 2, "latent": 4, "steps": 2, "ada_images": 50}
FLOW = {
    **{"name": "flow", "steps": 4, "batch_size": 4, "width": 8, "levels": 2, "blocks": 1, "sample_steps": 2},
}
REPLAY = {"generator": VQVAE2, "replay": {"probe": False}}
MADE = {"generator": DCGAN, "tuning": {"on": False}}
FELICIA = {
    **{"name": "felicia", "steps": 2, "learner_steps": 3, "release": "augmented"},
    **{"first_weights": "same", "central": "one"},
}
ENCODER = {"model": {"backbone": "efficientnet-lite0-1024", "input_size": 32}}
ONE_ROUND: dict[str, tuple[dict[str, Any], Tables]] = {
    "analytic": ({"name": "analytic"}, ENCODER),
    "gaussian-heads": ({"name": "gaussian-heads"}, ENCODER),
    "gaussian-heads, naive-bayes": ({"name": "gaussian-heads", "rule": "naive-bayes"}, ENCODER),
    "private-head": ({"name": "private-head", "phantoms": 10}, {**ENCODER, "privacy": {"noise_multiplier": 1.0}}),
    "fedpft": ({"name": "fedpft", "components": 2, "iterations": 3, "passes": 2}, ENCODER),
    "fedsamples": ({"name": "fedsamples", "looks": 1}, {"generator": FLOW}),
    "fedsamples, features": (
        {"name": "fedsamples", "looks": 2, "numbers": 16},
        {**ENCODER, "generator": {**FLOW, "space": "features"}},
    ),
}
#: one run by name: its method, and tables that differ from `BASE`
METHODS: dict[str, tuple[dict[str, Any], Tables]] = {
    "standalone": ({"name": "standalone"}, {"optimizer": {"augment": ["flip", "turn"]}}),
    "centralized": ({"name": "centralized"}, {"sites": {"partition": "label-skew", "count": 3, "target_ks": 0.4}}),
    "fedsgd": ({"name": "fedsgd"}, {}),
    "fedavg": ({"name": "fedavg"}, {"sites": {"partition": "dirichlet", "count": 3, "alpha": 1.0, "min_size": 4}}),
    "fedavg, another seed": ({"name": "fedavg"}, {"seed": 7}),  # type: ignore[dict-item]
    "fedavg, acquisition": ({"name": "fedavg"}, {"data": {"acquisition": 0.5}}),
    "fedprox": ({"name": "fedprox"}, {}),
    "fedavgm": ({"name": "fedavgm"}, {}),
    "fedbn": ({"name": "fedbn"}, {"model": {"backbone": "small-cnn"}}),
    "fedavg-share": ({"name": "fedavg-share"}, {}),
    "scaffold": ({"name": "scaffold"}, {}),
    "fedopt": ({"name": "fedopt"}, {}),
    "moon": ({"name": "moon"}, {}),
    "feddyn": ({"name": "feddyn"}, {}),
    "ditto": ({"name": "ditto"}, {}),
    "fedrep": ({"name": "fedrep", "head_epochs": 2}, {}),
    "fedper": ({"name": "fedper"}, {}),
    "finetune": ({"name": "finetune", "tuning_steps": 2}, {}),
    "fedavg, recipes": (
        {"name": "fedavg", "fraction": 0.5},
        {
            "task": {"name": "classification", "label_smoothing": 0.1},
            "optimizer": {
                **{"schedule": "cosine", "warmup": 1, "balanced_batches": True},
                "augment": ["crop", "rotate", "brightness", "contrast", "noise", "mixup"],
            },
        },
    ),
    "cwt": ({"name": "cwt"}, {}),
    "splitnn": ({"name": "splitnn"}, {}),
    "fedavg, batch norm local": ({"name": "fedavg"}, {"model": {"backbone": "small-cnn", "batch_norm": "local"}}),
    "fedavg, adam keeps its state": ({"name": "fedavg"}, {"optimizer": {"name": "adam", "keep_state": True}}),
    "fedavg, regression": ({"name": "fedavg"}, {"data": {"source": "hand-phantom"}, "task": {"name": "regression"}}),
    "fedavg, segmentation, unet": (
        {"name": "fedavg"},
        {
            "data": {"source": "brain-phantom"},
            "task": {"name": "segmentation"},
            "model": {"backbone": "unet"},
            "optimizer": {"augment": ["flip", "turn"]},
        },
    ),
    "cwt, resnet18": ({"name": "cwt", "rounds": 1}, {"model": {"backbone": "resnet18"}, "data": {"samples": 24}}),
    "fedavg, privacy": ({"name": "fedavg"}, {"privacy": {"noise_multiplier": 1.0, "clipping": "stored"}}),
}
REPLAYING: dict[str, tuple[dict[str, Any], Tables]] = {
    "cwt-replay": ({"name": "cwt-replay"}, REPLAY),
    "fedavg-replay": ({"name": "fedavg-replay"}, REPLAY),
    "cwt, replay": ({"name": "cwt"}, {**REPLAY, "replay": {"probe": False, "made": "buffer", "codes": "as-trained"}}),
    "cwt-replay, prior": (
        {"name": "cwt-replay"},
        {**REPLAY, "replay": {"probe": False, "codes": "prior", "samples": 8}},
    ),
    "cwt-replay, samples of a gan": (
        {"name": "cwt-replay"},
        {"generator": DCGAN, "replay": {"probe": False, "codes": "prior", "samples": 8}},
    ),
    "cwt-replay, privacy of the generator": (
        {"name": "cwt-replay"},
        {
            **REPLAY,
            "generator": {**VQVAE2, "codebook": "gradient"},
            "privacy": {"noise_multiplier": 1.0, "on": ["generator"], "clipping": "stored"},
        },
    ),
    "fedreplay": ({"name": "fedreplay"}, {}),
    # with two sites there is one ring only
    "feder": ({"name": "feder", "buffer": 8}, {**MADE, "sites": {"partition": "iid", "count": 3}}),
    "feder, asynchronous": (
        {"name": "feder", "buffer": 8, "mode": "asynchronous", "turn_takes": {"site-2": 1.5}},
        {**MADE, "sites": {"partition": "iid", "count": 3}},
    ),
    "feder, stylegan2": ({"name": "feder", "buffer": 8}, {**MADE, "generator": STYLEGAN2}),
    "feder, tuning": (
        {"name": "feder", "buffer": 8, "rounds": 1},
        {
            "generator": DCGAN,
            "tuning": {"most_steps": 2, "most_tuning_steps": 2, "check_every": 2, "measured": 20, "patience": 2},
        },
    ),
    "feder-a": ({"name": "feder-a", "buffer": 8}, MADE),
    "feder-b": ({"name": "feder-b", "buffer": 8}, MADE),
    "felicia": (FELICIA, {"generator": DCGAN}),
    "felicia, local": ({**FELICIA, "schedule": "local", "exchange_every": 1}, {"generator": DCGAN}),
    "felicia, apart": (FELICIA, {"generator": {**DCGAN, "condition": "apart", "balance": True}}),
    "felicia, even labels, shared noise": (
        {**FELICIA, "shared_noise": True, "wire": "small"},
        {"generator": {**DCGAN, "labels": "even"}},
    ),
    "felicia, privacy": (
        FELICIA,
        {
            "generator": {**DCGAN, "labels": "even", "discriminator_norm": "group", "norm": "group", "spread": False},
            "privacy": {"noise_multiplier": 1.0, "on": ["generator"], "clipping": "stored"},
        },
    ),
}


def digests_of_runs(runs: dict[str, tuple[dict[str, Any], Tables]]) -> dict[str, str]:
    import polyclinic

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (method, changes) in runs.items():
            tables = {table: {**BASE.get(table, {}), **value} for table, value in changes.items() if table != "seed"}
            if "sites" in changes:  # settings of another partition mean nothing to it
                tables["sites"] = changes["sites"]
            seed = {"seed": changes["seed"]} if "seed" in changes else {}
            study = polyclinic.Study(**{**BASE, **tables, **seed, "method": {"rounds": 2, **method}})
            result = polyclinic.run(study, Path(folder) / name, cache=Path(folder) / "cache")
            found[name] = result["weights_sha256"]
    return found


# --- pieces: generators, partitions, phantoms, attacks -------------------------------------------------


def digest(*arrays: Any) -> str:
    """Of the bytes and shapes of tensors and arrays."""
    import numpy as np

    total = hashlib.sha256()
    for array in map(np.asarray, arrays):
        total.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def random_images(count: int, *address: str, size: int = 28) -> Any:
    import torch

    from polyclinic.randomness import torch_rng

    return torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=torch_rng("recorded", *address))


def generators() -> dict[str, str]:
    """Images sampled from each after a couple of steps, and its weights."""
    import torch

    from polyclinic.generators import GENERATORS
    from polyclinic.randomness import torch_rng
    from polyclinic.tasks import Target

    images = random_images(8, "generators")
    labels = torch.arange(8) % 2
    small = {"width": 4, "latent": 8, "steps": 2}
    tables = [
        VQVAE2,
        {**VQVAE2, "codebook": "gradient"},
        DCGAN,
        {**DCGAN, "condition": "plane", "labels": "even", "balance": True},
        {"name": "gan", **small},
        {"name": "wgan-gp", **small, "critic_steps": 2},
        {**STYLEGAN2, "steps": 17},  # every kind of step, also those that come each 16th time
    ]
    found = {}
    for number, table in enumerate(tables):
        model = GENERATORS[table["name"]](**table).build(
            channels=3, size=28, target=Target(classes=("no", "yes")), seed=1
        )
        model.fit(images, labels, torch_rng("recorded", "fit"))
        sampled = model.sample(labels[:4], torch_rng("recorded", "sample"))
        found[f"generator {number}: {table['name']}"] = digest(sampled, *model.state().values())
    return found


def phantoms() -> dict[str, str]:
    from polyclinic.data.datasets import SOURCES

    found = {}
    for name, kind in SOURCES.items():
        if name.endswith("-phantom"):
            made = kind(source=name, samples=10, size=28).load()
            masks = [] if made.masks is None else [made.masks]
            found[f"phantom: {name}"] = digest(made.images, made.labels, *masks)
    return found


def partitions() -> dict[str, str]:
    import numpy as np

    from polyclinic.data.dataset import Dataset, split
    from polyclinic.data.partitions import PARTITIONS, assign_to_sites

    rng = np.random.default_rng(5)
    labels = rng.integers(2, size=120)
    data = Dataset(
        rng.integers(0, 256, (120, 1, 8, 8), np.uint8),
        labels,
        classes=("no", "yes"),
        site=rng.choice(["Graz", "Ulm", "Bern"], 120),
        subgroup=np.array([f"s{2 * c + rng.integers(2)}" for c in labels]),
    )
    settings: dict[str, dict[str, Any]] = {
        "iid": {"count": 3},
        "label-skew": {"count": 3, "target_ks": 0.4},
        "dirichlet": {"count": 3, "alpha": 1.0, "min_size": 4},
        "quantity": {"count": 3, "power": 1.5},
        "column": {},
        "clusters": {"count": 3, "mixing": 5},
        "subgroup-bias": {"count": 3, "subgroup": "s1", "share": 0.2, "per_class": 10},
    }
    found = {}
    for name, kind in PARTITIONS.items():
        where = split(data, validation=0.2, test=0.2, seed=3)
        parts = assign_to_sites(kind(partition=name, **settings[name]), data, where, 3)
        found[f"partition: {name}"] = digest(*(index for site in parts.values() for index in site.values()))
    return found


def attacks() -> dict[str, str]:
    import torch
    from torch.nn import functional as F

    from polyclinic.attacks.copies import CopySearch
    from polyclinic.attacks.gradient_inversion.networks import LeNet, with_random_weights
    from polyclinic.attacks.gradient_inversion.settings import GradientInversion
    from polyclinic.attacks.gradient_inversion.solver import Knowledge
    from polyclinic.attacks.latent_inversion import LatentInversion
    from polyclinic.attacks.membership import shadow_memberships
    from polyclinic.federation.ledger.parcel import Parcel
    from polyclinic.generators.probe import train_probe
    from polyclinic.randomness import torch_rng

    model = with_random_weights(LeNet(channels=1, classes=3, size=16), torch_rng("recorded", "weights"))
    images = torch.rand(2, 1, 16, 16, generator=torch_rng("recorded", "targets"))
    parcels = []
    for image, label in zip(images, (0, 2), strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(model(image[None]), torch.tensor([label])), model.parameters())
        names = [name for name, _ in model.named_parameters()]
        parcels.append(Parcel("gradients", dict(zip(names, gradients, strict=True))))
    known = Knowledge(model, (1, 16, 16), classes=3)
    settings = {
        "lbfgs": GradientInversion(iterations=2, restarts=2),
        "adam": GradientInversion(
            iterations=5, optimizer="adam", distance="cosine", start="normal", label="sign", total_variation=0.01
        ),
    }
    found = {}
    for name, attack in settings.items():
        back = attack.run(parcels, known)
        found[f"attack: gradient inversion, {name}"] = digest(back.images, back.labels, back.loss)
    inverted = LatentInversion(iterations=3).run(model(images).detach(), model, (1, 16, 16))
    found["attack: latent inversion"] = digest(inverted.images, inverted.loss)
    sets = [random_images(24, "copies", name) for name in ("made", "training", "held out")]
    copies = CopySearch().run(*sets)
    found["attack: copies"] = digest(copies.training.distance, copies.closer_share, copies.chance)
    found["attack: shadow models"] = digest(shadow_memberships(4, 20, 1))
    probe = train_probe(random_images(8, "probe"), torch.arange(8) % 2, 2, torch_rng("recorded", "probe"))
    found["probe"] = digest(*probe.state_dict().values())
    return found


def pieces() -> dict[str, str]:
    return {**phantoms(), **partitions(), **generators(), **attacks()}


GROUPS: dict[str, Callable[[], dict[str, str]]] = {
    "methods": lambda: digests_of_runs(METHODS),
    "one-round": lambda: digests_of_runs(ONE_ROUND),
    "replaying": lambda: digests_of_runs(REPLAYING),
    "pieces": pieces,
}


# --- the program ---------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Of what decides about the last bits; with others, digests mean nothing."""
    import numpy as np
    import torch

    return {"torch": torch.__version__, "numpy": np.__version__, "processor": platform.machine()}


def run_program(*groups: str) -> dict[str, dict[str, str]]:
    """The digests of these groups, by group, from a process of its own."""
    command = [sys.executable, __file__, "--here", *groups]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str]) -> None:
    groups = [one for one in arguments if not one.startswith("--")] or list(GROUPS)
    if "--here" in arguments:
        import torch

        torch.set_num_threads(1)
        print(json.dumps({group: GROUPS[group]() for group in groups}))
        return
    text = json.dumps({**versions(), "digests": run_program(*groups)}, indent=1) + "\n"
    if "--write" in arguments:
        RECORDED.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
