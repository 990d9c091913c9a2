"""A plug-in's operation that calls `local_training.train`, as the manual says, trains."""

import pytest

from polyclinic import Study, run

PLUGIN = """
from typing import ClassVar, Literal

from polyclinic import Method, Parcel, local_training, operation


class Alone(Method):
    name: Literal["NAME"] = "NAME"
    summary: ClassVar[str] = "every site trains alone"

    def run(self, federation):
        state = federation.state()
        for _ in federation.rounds(self.rounds, state):
            federation.ask_all("train")
            federation.evaluate()
        return {}

    def local_names(self, model, batch_norm):
        return frozenset(model.state_dict())

    @operation()
    def train(self, site):
        BODY


METHODS = {"NAME": Alone}
"""


@pytest.mark.parametrize(
    ("called", "body"),
    [
        ("trains-alone", "local_training.train(site, {})"),
        ("trains-and-looks", "assert local_training.train(site, {}).metadata['steps']"),
    ],
)
def test_an_operation_may_train_and_release_nothing(tmp_path, called, body):
    (tmp_path / "plugin.py").write_text(PLUGIN.replace("BODY", body).replace("NAME", called))
    tables = {
        "plugins": [str(tmp_path / "plugin.py")],
        "data": {"source": "fundus-phantom", "size": 28, "samples": 36, "validation": 0.2, "test": 0.2},
        "sites": {"partition": "iid", "count": 2},
        "model": {"backbone": "lenet5"},
        "optimizer": {"lr": 0.05, "batch_size": 4},
        "engine": {"workers": 1, "device": "cpu"},
    }
    results = [
        run(Study(**tables, method={"name": name, "rounds": 1}), tmp_path / name, cache=tmp_path / "cache")
        for name in (called, "standalone")
    ]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
