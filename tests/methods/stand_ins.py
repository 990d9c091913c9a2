"""A coordinator and a site as plain Python, for arithmetic by hand; and what a finished run was made of."""

import tomllib
from types import SimpleNamespace

import torch

from polyclinic.data.parts import open_site, prepare
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.site import SiteState
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import parse_study


class Coordinator(SimpleNamespace):
    """A federation of two sites whose replies are written down, one list for each round."""

    sites = ("a", "b")

    def state(self, **given):
        self.kept = SimpleNamespace(**given)
        return self.kept

    def rounds(self, count, state):
        return range(1, count + 1)

    def ask_all(self, operation, **given):
        self.asked = [*getattr(self, "asked", []), (operation, given)]
        return self.replies[len(self.asked) - 1]

    def evaluate(self, weights):
        self.scored = [*getattr(self, "scored", []), weights]


def reply(site: str, samples: int, **tensors: list) -> Reply:
    return Reply(site, (Parcel("weights", {n: torch.tensor(t) for n, t in tensors.items()}, {"samples": samples}),))


def site_with_state(name, **state):
    """A site whose network has two weights."""
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(2))})
    model.cuts = ("first", "last")
    trainer = SimpleNamespace(device=torch.device("cpu"), model=model, initial_local={}, local_names=(), privacy=None)
    return SimpleNamespace(name=name, trainer=trainer, state=SiteState(state))


def rebuild(result):
    """The study of a finished run, its assembly and trainer, and the sites' images: for a bare loop beside the run."""
    study = parse_study(tomllib.loads((result.folder / "study.toml").read_text()))
    parts = prepare(study.data, study.sites)
    assembly = Assembly(study, parts, result.folder)
    sites = {name: open_site(parts.folder, name) for name in parts.names}
    return SimpleNamespace(study=study, assembly=assembly, trainer=assembly.trainer(), sites=sites)
