"""Torch modules as a description of their layers and their weights.

Sequences of known layers are described by names and arguments. Any other module needs a factory: the file then says which was used,
and is loaded only by someone who gives one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from fullconformal.runtime.files import one_line
from fullconformal.storage.container import StorageError
from fullconformal.storage.limits import LIMITS
from fullconformal.storage.values import KINDS, Kind, Packer, Unpacker, among, expect, printable, require

CONV = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias", "padding_mode")
NORM = ("num_features", "eps", "momentum", "affine", "track_running_stats")
MAX_POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
AVG_POOL = ("kernel_size", "stride", "padding", "ceil_mode")

# The layers that may be loaded, and the constructor arguments that describe one.
LAYERS: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    cls.__name__: (cls, arguments)
    for cls, arguments in [
        (nn.Linear, ("in_features", "out_features", "bias")),
        *((cls, CONV) for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
        *((cls, MAX_POOL) for cls in (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)),
        *((cls, AVG_POOL) for cls in (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)),
        *((cls, ("output_size",)) for cls in (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)),
        *((cls, NORM) for cls in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)),
        (nn.LayerNorm, ("normalized_shape", "eps", "elementwise_affine", "bias")),
        (nn.GroupNorm, ("num_groups", "num_channels", "eps", "affine")),
        (nn.Flatten, ("start_dim", "end_dim")),
        *((cls, ("p", "inplace")) for cls in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)),
        *((cls, ("inplace",)) for cls in (nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Hardswish)),
        (nn.LeakyReLU, ("negative_slope", "inplace")),
        *((cls, ("alpha", "inplace")) for cls in (nn.ELU, nn.CELU)),
        (nn.GELU, ("approximate",)),
        (nn.Softplus, ("beta", "threshold")),
        *((cls, ()) for cls in (nn.Tanh, nn.Sigmoid, nn.Identity, nn.Softsign)),
    ]
}
# Modules around one other module that say one word about it: their class, and the names of the attributes that hold the two.
WRAPPERS: dict[str, tuple[Callable[..., nn.Module], str, str]] = {}
Shape = tuple[int, ...]
Walk = Generator[tuple[nn.Module, Shape, Shape], None, Shape]
# Sizes that no weight bears out; large ones would make a small file fill the memory at its first forward pass.
UNPROVED = {"kernel_size", "stride", "padding", "dilation", "output_size"}


class Factory:
    """A callable without arguments that returns the architecture, and the name it goes by."""

    def __init__(self, given: Callable[[], nn.Module] | str):
        if not (callable(given) or (isinstance(given, str) and given.count(":") == 1)):
            raise StorageError(f"factory={given!r} is not allowed; give a callable, or 'module:function'.")
        self.given = given
        self.name = given if isinstance(given, str) else f"{given.__module__}:{given.__qualname__}"

    def __call__(self) -> nn.Module:
        """A new module of the architecture; imports it where the caller gave a name."""
        try:
            make = self.given
            if isinstance(make, str):
                module, name = make.split(":")
                make = getattr(import_module(module), name)
            made = make()
        except Exception as error:
            raise StorageError(f"factory {self.name!r} failed: {type(error).__name__}: {one_line(error)}.") from error
        if not isinstance(made, nn.Module):
            raise StorageError(f"factory {self.name!r} returned {type(made).__name__}, not a torch.nn.Module.")
        return made


def pack_module(module: nn.Module, packer: Packer) -> dict[str, Any]:
    """A module's layers, weights, and which of them are frozen or in training mode."""
    shared = len({id(part) for part in module.modules()}) < len(list(module.named_modules(remove_duplicate=False)))
    return {
        "layers": describe(module, packer.factory, shared),
        "state": dict(module.state_dict()),
        "frozen": [name for name, q in module.named_parameters() if not q.requires_grad],
        "training": [name for name, part in module.named_modules() if part.training],
    }


def describe(module: nn.Module, factory: Factory | None, shared: bool) -> dict[str, Any]:
    """What `build` makes the module's layers from: known layers, or the factory where it gives the same parameters."""
    cls, hooked = type(module), bool(module._forward_hooks or module._forward_pre_hooks)
    odd = shared or hooked or "forward" in vars(module)
    if not odd and cls.__name__ in WRAPPERS and WRAPPERS[cls.__name__][0] is cls:
        _, inner, name = WRAPPERS[cls.__name__]
        return {
            "layer": cls.__name__,
            name: getattr(module, name),
            "inner": describe(getattr(module, inner), factory, False),
        }
    if not odd and cls is nn.Sequential:
        try:
            steps = [[name, describe(part, factory, False)] for name, part in module.named_children()]
            return {"layer": "Sequential", "inner": steps}
        except StorageError:
            if factory is None or not gives(factory, module):
                raise
    elif not odd and cls.__name__ in LAYERS and LAYERS[cls.__name__][0] is cls:
        arguments = arguments_of(module)
        if allowed(arguments):
            return {"layer": cls.__name__, "arguments": arguments}
    if factory is not None and gives(factory, module):
        return {"layer": "factory", "name": factory.name}
    why = "shares or hooks layers" if odd else "is no sequence of known layers"
    if factory is not None:
        why = f"has other parameters than what factory={factory.name!r} returns"
    raise StorageError(
        f"the module {cls.__module__}.{cls.__qualname__} {why}, so its weights cannot be saved with its architecture; give "
        "save(path, factory='package.module:function'), a function that returns the same architecture."
    )


def arguments_of(layer: nn.Module) -> dict[str, Any]:
    """The constructor arguments of a known layer, read from its attributes."""
    out = {}
    for name in LAYERS[type(layer).__name__][1]:
        value = getattr(layer, name)
        if name == "bias":
            value = value is not None
        out[name] = tuple(value) if isinstance(value, tuple) else value
    return out


def allowed(arguments: dict[str, Any]) -> bool:
    """Whether a layer's arguments are plain, and no larger than its weights can bear out."""
    of = {name: value if isinstance(value, tuple) else (value,) for name, value in arguments.items()}
    for name, parts in of.items():
        if not all(part is None or isinstance(part, (bool, int, float, str)) for part in parts):
            return False
        if name in UNPROVED and any(isinstance(part, int) and not 0 <= part <= LIMITS.unproved for part in parts):
            return False
    # A pool with gaps, as wide as a small object, may find nothing but padding: torch then writes gradients outside of the object.
    gaps = "ceil_mode" in of and any(gap != 1 for gap in of.get("dilation", ()))
    return not (gaps and any(of["padding"]))


def gives(factory: Factory, module: nn.Module) -> bool:
    """Whether a factory returns a module with the same parameters and buffers."""
    shapes = [{name: value.shape for name, value in part.state_dict().items()} for part in (factory(), module)]
    return shapes[0] == shapes[1]


def unpack_module(values: dict[str, Any], unpacker: Unpacker) -> nn.Module:
    """The module again, with the weights of the file; nothing is allocated for layers before their weights are there."""
    module = build(expect(values["layers"], dict), unpacker)
    put_weights(module, expect(values["state"], dict))
    tensors = [*module.parameters(), *module.buffers()]
    if any(value.is_meta or (value.is_floating_point() and not torch.isfinite(value).all()) for value in tensors):
        raise StorageError("a module's weights are missing or not finite")
    parameters, parts = dict(module.named_parameters()), dict(module.named_modules())
    for q in parameters.values():
        q.requires_grad_(True)
    for name in expect(values["frozen"], list):
        parameters[name].requires_grad_(False)
    module.eval()
    for name in expect(values["training"], list):
        parts[name].training = True
    return module.to(unpacker.device)


@torch.no_grad()
def put_weights(module: nn.Module, state: dict[str, Any]) -> None:
    """Give a module its weights: layers that have none yet take the tensors, those of a factory, which may be tied, copies."""
    own = module.state_dict()
    shapes = {name: value.shape for name, value in state.items() if isinstance(value, torch.Tensor)}
    if {name: value.shape for name, value in own.items()} != shapes or len(shapes) < len(state):
        raise StorageError("a module's weights have not the names and shapes of its layers")
    empty = {name: state[name] for name, value in own.items() if value.is_meta}
    module.load_state_dict(empty, strict=False, assign=True)
    for name, part in [*module.named_parameters(), *module.named_buffers()]:
        if name in state:
            part.data = part.data.to(state[name].dtype)
    module.load_state_dict(state)


def build(node: dict[str, Any], unpacker: Unpacker) -> nn.Module:
    """Layers without weights, or what the factory returns where the file asks for one."""
    layer, factory = node["layer"], cast(Factory | None, unpacker.factory)
    unpacker.take(LIMITS.layer)
    if layer == "factory":
        if factory is None:
            raise StorageError(
                f"its network was made by {str(node.get('name'))[:100]!r}, and no file is let import code: where you trust it, "
                "pass it to load(path, factory=...) (on the command line: --model)"
            )
        return factory()
    if layer == "Sequential":
        parts = nn.Sequential()
        for name, inner in expect(node["inner"], list):
            parts.add_module(printable(name), build(expect(inner, dict), unpacker))
        return parts
    if layer in WRAPPERS:
        cls, _, name = WRAPPERS[layer]
        return cls(build(expect(node["inner"], dict), unpacker), expect(node[name], str))
    cls, names = LAYERS[among(layer, LAYERS)]
    arguments = expect(node["arguments"], dict)
    require(sorted(arguments) == sorted(names) and allowed(arguments), f"{layer}'s arguments")
    with torch.device("meta"):
        return cls(**arguments)


def walk(module: nn.Module, shape: tuple[int, ...]) -> Walk:
    """The layers in their order, each with the shapes of an object before and behind it; the last of these comes back."""
    if type(module).__name__ in WRAPPERS:
        _, inner, head = WRAPPERS[type(module).__name__]
        last = getattr(module, inner).get_submodule(getattr(module, head))
        require(isinstance(last, nn.Linear), "head")
        for step in walk(getattr(module, inner), shape):
            yield step
            shape = step[1] if step[0] is last else shape
    elif isinstance(module, nn.Sequential):
        for part in module:
            shape = yield from walk(part, shape)
    else:
        before, shape = shape, shape_after(module, shape)
        yield module, before, shape
    return shape


def on_the_way(layer: Any, before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """How many numbers a convolution makes beside its own: padded objects, and the patches that torch lays out if not in float32."""
    if type(layer) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return 0
    sides = layer._reversed_padding_repeated_twice[::-1]
    padded = before[0] * math.prod(map(sum, zip(before[1:], sides[::2], sides[1::2], strict=True)))
    patches = layer.groups * layer.weight[0].numel() * math.prod(after[1:])
    return int(padded if layer.weight.dtype == torch.float32 else max(padded, patches))


def shape_after(layer: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of what a known layer makes of an object of a shape."""
    name = type(layer).__name__
    if isinstance(layer, nn.Linear):
        return (*shape[:-1], layer.out_features)
    if isinstance(layer, nn.Flatten):
        # Among the object's own axes, which come behind that of the objects.
        start, stop = (at - 1 if at > 0 else at + len(shape) for at in (layer.start_dim, layer.end_dim))
        return (*shape[: max(start, 0)], math.prod(shape[max(start, 0) : stop + 1]), *shape[stop + 1 :])
    known = name in LAYERS and type(layer) is LAYERS[name][0]
    if not known or not UNPROVED & set(LAYERS[name][1]):
        return shape
    places = int(name[-2])
    require(len(shape) == places + 1, "shape of objects")

    def each(argument: str, default: int = 1) -> tuple[Any, ...]:
        value = getattr(layer, argument, default)
        return value if isinstance(value, tuple) else (value,) * places

    channels = getattr(layer, "out_channels", shape[0])
    if hasattr(layer, "output_size"):
        out = [old if new is None else new for old, new in zip(shape[1:], each("output_size"), strict=True)]
    elif layer.padding == "same":
        out = list(shape[1:])
    else:
        padding = (0,) * places if layer.padding == "valid" else each("padding")
        steps = zip(shape[1:], each("kernel_size"), each("stride"), padding, each("dilation"), strict=True)
        # Rounded up, as some pools are told to.
        out = [max(0, -((d * (k - 1) + 1 - n - 2 * p) // s) + 1) for n, k, s, p, d in steps]
    return (channels, *out)


def check_activations(module: nn.Module, shape: tuple[int, ...], rows: int, numbers: int) -> int:
    """The largest array a loaded network makes of an object of a shape; an error where so many rows in the file would make too much.

    Padding and pooling make large arrays of small ones, and no weight bears them out. A factory's layers are the loader's own code.
    """
    steps = list(walk(module, shape))
    sizes = [math.prod(after) for _, _, after in steps]
    aside = max((on_the_way(*step) for step in steps), default=0)
    total = rows * sum(sizes) + aside
    require(
        total <= LIMITS.activations(numbers + sum(q.numel() for q in module.parameters())),
        f"network, which makes {total:,} numbers of its {rows:,} objects,",
    )
    return max(aside, *sizes, 0)


KINDS["module"] = Kind(nn.Module, pack_module, unpack_module)
