"""Stand-ins for CUDA streams and graphs, where there is no GPU.

A pretended graph runs nothing when it is recorded; a replay calls the function again and overwrites the tensors that
the first replay gave, as a real graph does.
"""

import torch
from torch.utils._pytree import tree_map_only

from polyclinic.training.gpu import graphs


class Stream:
    def wait_stream(self, other): ...


class Nothing:
    """A context in which nothing happens."""

    def __init__(self, *_, **__): ...

    def __enter__(self): ...

    def __exit__(self, *_): ...


class PretendedGraph:
    def __init__(self, of, inputs):
        self.function, self.inputs = of.function, tuple(one if one is None else one.clone() for one in inputs)
        self.output = None

    def replay(self, inputs):
        for kept, new in zip(self.inputs, inputs, strict=True):
            if kept is not None:
                kept.copy_(new)
        output = self.function(*self.inputs)
        if self.output is None:
            self.output = tree_map_only(torch.Tensor, torch.clone, output)
        else:
            kept = iter(torch.utils._pytree.tree_leaves(self.output))
            tree_map_only(torch.Tensor, lambda new: next(kept).copy_(new), output)
        return self.output


class BrokenGraph:
    """What CUDA says of a function that reads a number from the GPU. Half of the function has run by then in Python."""

    def __init__(self, of, inputs):
        raise RuntimeError("operation not permitted when stream is capturing")


def pretend_gpu(monkeypatch, graph=PretendedGraph):
    """Have `GraphedFunction` record on a CPU."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", Nothing)
    monkeypatch.setattr(graphs, "Graph", graph)
    monkeypatch.setattr(graphs, "_leave_recording", lambda rngs: None)
