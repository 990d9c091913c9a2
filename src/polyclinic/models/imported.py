"""Any importable network as a backbone: `monai.networks.nets:DenseNet121`, with `[model.arguments]`.

What the callable names among its parameters is passed: channels and side of the images, number of outputs, spatial
dimensions, no pretrained weights. Arguments of the study come first.
"""

import contextlib
import functools
import importlib
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from polyclinic.errors import BadInput
from polyclinic.models.backbone import Backbone, with_norm
from polyclinic.registry import allows_module, reason

#: names under which networks take what we know of the images and of the task
CHANNELS = ("in_channels", "n_input_channels", "in_chans", "input_channels", "num_input_channels")
OUTPUTS = ("out_channels", "num_classes", "n_classes", "classes", "num_outputs")
TRIAL = 2  #: images that are sent through a network once, to see what comes out


class Imported(Backbone):
    """A network out of another package. It can be cut between the layers of an `nn.Sequential`, else nowhere."""

    make: ClassVar[Callable[..., nn.Module]]
    arguments: ClassVar[Mapping[str, Any]]
    is_sequence: ClassVar[bool]
    device: ClassVar[str]  #: meta, or cpu where a network cannot be built without memory

    def __init__(self, channels: int, outputs: int, size: int, norm: str) -> None:
        super().__init__(channels, outputs, size, norm)
        network = make_network(self.name, type(self).make, self.arguments, (channels, outputs, size))
        network = with_norm(network, norm)
        for layer in network.modules():
            if getattr(layer, "inplace", False):  # the same numbers; gradients per image cannot follow the other way
                layer.inplace = False  # type: ignore[assignment]
        children = network.named_children() if self.is_sequence else [("network", network)]
        for name, child in children:
            self.add_module(name, child)

    @classmethod
    def without_weights(cls, size: int, norm: str) -> Self:
        return cls.sample(size, norm, cls.device)

    @classmethod
    def sample(cls, size: int, norm: str, device: str = "cpu") -> Self:
        """A network to try out, for as many channels and outputs as the arguments name, or 1 and 2."""
        channels, outputs = _told(cls.arguments, CHANNELS, 1), _told(cls.arguments, OUTPUTS, 2)
        with torch.random.fork_rng(devices=[]), torch.device(device):
            return cls(channels, outputs, size, norm)

    @classmethod
    def own_name(cls, name: str) -> str:
        """A file of the network's own `state_dict` does not say that the network is a part of ours."""
        return name if cls.is_sequence or name.startswith("network.") else f"network.{name}"

    def run_stage(self, stage: str, x: Tensor) -> Tensor:
        return first(super().run_stage(stage, x))


def channels_of(network: type[Imported]) -> int:
    """The channels of images that a `sample` takes."""
    return _told(network.arguments, CHANNELS, 1)


def imported(target: str, arguments: Mapping[str, Any], size: int) -> type[Backbone]:
    """The backbone that `package.module:callable` names, after a trial with images of this side; BadInput if it fails.

    The same target and arguments give the same class.
    """
    module = target.partition(":")[0]
    if not allows_module(module):  # at a deployed site
        raise BadInput(
            f"model.backbone: '{target}' is code that this site has not listed; its people can add '{module}' to "
            "plugins in local/site.toml"
        )
    return _imported(target, json.dumps(dict(arguments), sort_keys=True), size)


@functools.lru_cache(maxsize=32)
def _imported(target: str, arguments: str, size: int) -> type[Backbone]:
    make, given = find_callable(target), json.loads(arguments)
    channels, outputs = _told(given, CHANNELS, 1), _told(given, OUTPUTS, 2)
    network, output, device = _tried(target, make, given, (channels, outputs, size))
    is_sequence = isinstance(network, nn.Sequential) and len(network) > 1
    names = [name for name, _ in network.named_children()] if is_sequence else ["network"]
    facts = {
        "name": target, "summary": f"{target}, a network of another package", "make": staticmethod(make),
        "arguments": given, "is_sequence": is_sequence, "device": device, "stages": {name: (name,) for name in names},
        "dense": _is_dense(target, output, outputs, size), "volumes": not isinstance(size, int),
    }  # fmt: skip
    return type(make.__name__, (Imported,), facts)


def find_callable(target: str) -> Callable[..., nn.Module]:
    """The callable of `package.module:callable`: a class of networks, or a function that says it returns one."""
    module, _, name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise BadInput(f"model.backbone: '{module}' cannot be imported ({reason(error)}); install it") from None
    except AttributeError:
        raise BadInput(f"model.backbone: '{module}' has no '{name}'; write package.module:callable") from None
    if _returned_class(found) is None:
        raise BadInput(
            f"model.backbone: '{target}' is neither a torch.nn.Module nor a function whose annotation says that it "
            "returns one; name another, or write a small function with `-> nn.Module` in a plug-in"
        )
    return found


def make_network(
    target: str, make: Callable[..., nn.Module], arguments: Mapping[str, Any], shape: tuple[int, int, int]
) -> nn.Module:
    """A new network for (channels, outputs, size); BadInput says which argument does not fit."""
    channels, outputs, _ = shape
    for names, value, what in ((CHANNELS, channels, "channels"), (OUTPUTS, outputs, "outputs")):
        for name in names:
            if arguments.get(name, value) != value:
                raise BadInput(
                    f"model.arguments.{name}: is {arguments[name]}, and the study needs {value} {what}; leave it out"
                )
    try:
        return make(**{**bound(make, shape), **arguments})
    except Exception as error:  # another package's complaint about its arguments
        raise BadInput(f"model.arguments: {target} cannot be built: {reason(error)}") from None


def bound(make: Callable[..., nn.Module], shape: tuple[int, int, int]) -> dict[str, Any]:
    """The arguments that we know and the callable names."""
    channels, outputs, size = shape
    known: dict[str, Any] = dict.fromkeys(CHANNELS, channels) | dict.fromkeys(OUTPUTS, outputs)
    sides = sides_of(size)
    known |= {"spatial_dims": len(sides), "img_size": sides, "image_size": size, "pretrained": False}
    known |= {"in_shape": (channels, *sides), "out_shape": (outputs,)}
    accepted = set(_parameters(make))
    return {name: value for name, value in known.items() if name in accepted}


def sides_of(size: int | Sequence[int]) -> tuple[int, ...]:
    """The sides of images of this size, or of patches of volumes."""
    return (size, size) if isinstance(size, int) else tuple(size)


def first(output: Any) -> Any:
    """The output itself, of networks that give it with other things (hidden states, deep supervision)."""
    return output[0] if isinstance(output, list | tuple) and output else output


# --- how a network is looked at -----------------------------------------------------------------------


def _parameters(make: Callable[..., Any]) -> Iterator[str]:
    """Names of all parameters, those behind `**kwargs` too: of a class's parents, or of the class that is returned."""
    own = inspect.signature(make).parameters.values()
    yield from (one.name for one in own)
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in own):
        behind = make.__mro__[1:] if isinstance(make, type) else [_returned_class(make)]
        for parent in behind:
            if isinstance(parent, type) and issubclass(parent, nn.Module) and parent is not nn.Module:
                yield from inspect.signature(parent).parameters


def _returned_class(found: Any) -> type[nn.Module] | None:
    if isinstance(found, type):
        return found if issubclass(found, nn.Module) else None
    if not inspect.isfunction(found):
        return None
    with contextlib.suppress(Exception):  # annotations that cannot be resolved say nothing
        answer = typing.get_type_hints(found).get("return")
        return answer if isinstance(answer, type) and issubclass(answer, nn.Module) else None
    return None


def _told(arguments: Mapping[str, Any], names: tuple[str, ...], otherwise: int) -> int:
    return next((arguments[name] for name in names if isinstance(arguments.get(name), int)), otherwise)


def _tried(
    target: str, make: Callable[..., nn.Module], given: Mapping[str, Any], shape: tuple[int, int, int]
) -> tuple[nn.Module, Tensor, str]:
    """The network, what it gives for two black images, and the device: meta (no memory, no arithmetic), or cpu."""
    channels, _, size = shape
    problem: Exception | None = None
    for device in ("meta", "cpu"):  # some networks cannot be built without memory
        try:
            with torch.random.fork_rng(devices=[]), torch.device(device), torch.no_grad():
                network = make_network(target, make, given, shape).eval()
                return network, first(network(torch.zeros(TRIAL, channels, *sides_of(size)))), device
        except Exception as error:
            problem = error
    if isinstance(problem, BadInput):
        raise problem
    images, why = " x ".join(map(str, (channels, *sides_of(size)))), reason(problem) if problem else ""
    raise BadInput(
        f"model.backbone: {target} cannot take images of {images}: {why}; change data.size or model.arguments"
    )


def _is_dense(target: str, output: Any, outputs: int, size: int) -> bool:
    shape = tuple(output.shape) if isinstance(output, Tensor) else None
    whole = (TRIAL, outputs, *sides_of(size))
    if shape not in ((TRIAL, outputs), whole):
        found = shape or type(output).__name__
        raise BadInput(
            f"model.backbone: {target} gives {found} for {TRIAL} images of {size} px, and must give "
            f"({TRIAL}, {outputs}), or {whole} for masks; change model.arguments"
        )
    return shape == whole
