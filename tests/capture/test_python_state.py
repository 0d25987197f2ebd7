"""A fused model does what the model does, whatever Python does: values, side effects, errors.

Each probe is a model, and steps that change it or the world between calls. It runs twice, plain and
fused, from the same state; outputs, gradients and whatever the steps return must be equal.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import epinorm
from epinorm.backends.cuda.runtime.native import native
from epinorm.capture import rewriting, unchanged
from epinorm.operator import native_calls
from own_masks import own_masks

K, N, GROUPS, ROWS = 6, 8, 4, 5

Step = Callable[[nn.Module], Any]
PROBES: dict[str, tuple[Callable[[], nn.Module], tuple[Step, ...]]] = {}


def probe(name: str, *steps: Step) -> Callable[[Any], Any]:
    """Register a model class or a function that makes a model, and the steps between calls."""

    def register(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        assert name not in PROBES
        PROBES[name] = (make, steps)
        return make

    return register


class Base(nn.Module):
    """fc → norm → act, and an attribute of every kind that a probe may want."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.norm = nn.GroupNorm(GROUPS, N)
        self.act = nn.LeakyReLU(0.1)
        self.drop = nn.Dropout(0.0)
        self.sub = Sub()
        self.gain = 2.0
        self.calls = 0
        self.log: list[Any] = []
        self.table = {"slope": 0.1, "deep": {"gain": [1.0, 2.0]}}

    def chain(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.fc(x)))

    def forward(self, x: Tensor) -> Any:
        return self.chain(x)


class Sub(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = 3.0
        self.leaf = nn.Identity()
        self.leaf.depth = 0.5

    def method(self, y: Tensor) -> Tensor:
        return y * self.value + 1

    def forward(self, y: Tensor) -> Tensor:
        return y * self.leaf.depth


class Config:
    SCALE = 2.0
    calls = 0
    flags: dict[str, float] = {"on": 1.0}  # noqa: RUF012


@dataclasses.dataclass
class Options:
    gain: float = 2.0
    use: bool = True


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


COMPILING = (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling)
SCALE = 3.0
COUNTER: list[Any] = []
STATE = types.SimpleNamespace(gain=1.5, seen=0)
MODULE = types.ModuleType("made_up")
MODULE.gain = 1.25
MODULE._global_forward_hooks = 1.0


def helper(y: Tensor) -> Tensor:
    return y * SCALE


def assign(path: str, value: Any) -> Step:
    """A step that sets an attribute of the model, however deep."""
    *owners, name = path.split(".")

    def step(m: nn.Module) -> None:
        setattr(functools.reduce(getattr, owners, m), name, value)

    return step


def world(owner: Any, name: str, value: Any) -> Step:
    """A step that sets an attribute of something beside the model; undone after the run."""

    def step(m: nn.Module) -> None:
        before = getattr(owner, name)
        UNDO.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    return step


UNDO: list[Callable[[], Any]] = []


class Globals:
    """Attributes of this module's globals, for ``world``."""

    def __getattr__(self, name: str) -> Any:
        return globals()[name]

    def __setattr__(self, name: str, value: Any) -> None:
        globals()[name] = value


HERE = Globals()


def forward(name: str, *steps: Step) -> Callable[[Callable[..., Any]], Any]:
    """A probe whose model is ``Base`` with this ``forward``."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        cls = type("Probe", (Base,), {"forward": function})
        probe(name, *steps)(cls)
        return function

    return register


def noop(m: nn.Module) -> None:
    pass


# The probes of FINDINGS A2, first those of children's attributes.


@forward("asks whether it is compiled")
def _(self, x):
    if any(f() for f in COMPILING) or torch._dynamo.is_compiling() or torch.jit.is_tracing():
        x = x * 2
    return self.chain(x)


@forward("attribute of a child", assign("sub.value", 5.0))
def _(self, x):
    return self.chain(x) * self.sub.value


@forward("method of a child", assign("sub.value", -1.0))
def _(self, x):
    return self.sub.method(self.chain(x))


@forward("out_features of a layer", assign("fc.out_features", 3))
def _(self, x):
    return self.chain(x) * self.fc.out_features


@forward("training of a child", lambda m: m.fc.eval() and None, lambda m: m.fc.train() and None)
def _(self, x):
    return self.chain(x) * 2 if self.fc.training else self.chain(x)


@forward("p of a dropout", assign("drop.p", 0.75))
def _(self, x):
    return self.chain(x) * self.drop.p + 1


@forward("attribute of a class", world(Config, "SCALE", 7.0))
def _(self, x):
    return self.chain(x) * Config.SCALE


@forward("attribute of a namespace", world(STATE, "gain", -2.0))
def _(self, x):
    return self.chain(x) * STATE.gain


@forward("attribute of a Python module", world(MODULE, "gain", 4.0))
def _(self, x):
    return self.chain(x) * MODULE.gain


@forward("count on a class", lambda m: Config.calls, lambda m: Config.calls)
def _(self, x):
    Config.calls += 1
    return self.chain(x)


@forward("mutable default argument", noop, noop)
def _(self, x, seen=[]):  # noqa: B006
    seen.append(1)
    return self.chain(x) * len(self.log.append(len(seen)) or self.log)


@forward("type(x) is Tensor")
def _(self, x):
    return self.chain(x) if type(x) is torch.Tensor else -self.chain(x)


@forward("hasattr of a tensor")
def _(self, x):
    return self.chain(x) * (2 if hasattr(x, "a") else 3) * (5 if hasattr(x, "shape") else 7)


@forward("match on a tensor")
def _(self, x):
    match x:
        case torch.Tensor():
            return self.chain(x)
        case _:
            return -self.chain(x)


@forward("str of a dtype")
def _(self, x):
    return self.chain(x) * (2 if str(x.dtype) == "torch.float64" else 3)


@forward("getattr with a default")
def _(self, x):
    scale = getattr(x, "scale", None)
    return self.chain(x) if scale is None else self.chain(x) * scale


@forward("norm weight changed between")
def _(self, x):
    h = self.fc(x)
    self.norm.weight.data.mul_(2)
    return self.norm(h)


@forward("bias changed between")
def _(self, x):
    h = self.fc(x)
    with torch.no_grad():
        self.norm.bias.add_(1)
    return self.norm(h), self.norm(self.fc(x))


@forward("constant of an activation", assign("act.negative_slope", 0.7))
def _(self, x):
    return self.chain(x)


# Attributes at every depth.


@forward("own attribute", assign("gain", -1.0), assign("gain", 0.25))
def _(self, x):
    return self.chain(x) * self.gain


@forward("attribute of a grandchild", assign("sub.leaf.depth", 9.0))
def _(self, x):
    return self.sub(self.chain(x))


def set_deep(m: nn.Module) -> None:
    m.table["deep"]["gain"][1] = -3.0


@forward("number in a list in a dict in a dict", set_deep)
def _(self, x):
    return self.chain(x) * self.table["deep"]["gain"][1]


@forward("new key of a dict", lambda m: m.table.update(bias=1.0))
def _(self, x):
    return self.chain(x) + self.table.get("bias", 0.0)


@forward("length of a list", lambda m: m.log.append(1), lambda m: m.log.extend([2, 3]))
def _(self, x):
    return self.chain(x) * (1 + len(self.log))


def with_options() -> nn.Module:
    class Model(Base):
        def forward(self, x):
            y = self.chain(x) * self.options.gain
            return y if self.options.use else -y

    model = Model()
    model.options = Options()
    return model


probe("dataclass", assign("options.gain", 0.5), assign("options.use", False))(with_options)


def with_enum() -> nn.Module:
    class Model(Base):
        def forward(self, x):
            return self.chain(x) * (2 if self.mode is Mode.DOUBLE else 1)

    model = Model()
    model.mode = Mode.PLAIN
    return model


probe("enum", assign("mode", Mode.DOUBLE))(with_enum)


class WithProperty(Base):
    @property
    def factor(self) -> float:
        return self.gain * self.sub.value

    def forward(self, x):
        return self.chain(x) * self.factor


probe("property", assign("gain", 4.0), assign("sub.value", 0.1))(WithProperty)


class WithSlots:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 2.0


def with_slots() -> nn.Module:
    class Model(Base):
        def forward(self, x):
            return self.chain(x) * self.slots.gain

    model = Model()
    model.slots = WithSlots()
    return model


probe("slots", assign("slots.gain", 8.0))(with_slots)


class WithGetattr(Base):
    def __getattr__(self, name: str) -> Any:
        return self.table["slope"] if name == "made_up" else super().__getattr__(name)

    def forward(self, x):
        return self.chain(x) * self.made_up


probe("__getattr__", lambda m: m.table.update(slope=6.0))(WithGetattr)


# Globals, closures, defaults.


@forward("global", world(HERE, "SCALE", 5.0))
def _(self, x):
    return self.chain(x) * SCALE


@forward("global in a helper", world(HERE, "SCALE", -4.0))
def _(self, x):
    return helper(self.chain(x))


@forward("helper replaced", world(HERE, "helper", lambda y: y - 1))
def _(self, x):
    return helper(self.chain(x))


@forward("dict of a class", lambda m: Config.flags.update(on=2.0))
def _(self, x):
    return self.chain(x) * Config.flags["on"]


def with_closure() -> nn.Module:
    factor = 2.0

    class Model(Base):
        def forward(self, x):
            return self.chain(x) * factor

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    model = Model()
    object.__setattr__(model, "change", change)
    return model


probe("closure", lambda m: m.change(-2.0), lambda m: m.change(0.5))(with_closure)


class WithDefaults(Base):
    def forward(self, x, scale=2.0, *, shift=1.0):
        return self.chain(x) * scale + shift


def other_defaults(m: nn.Module) -> None:
    function = type(m).forward
    before, keyword = function.__defaults__, function.__kwdefaults__
    UNDO.append(lambda: setattr(function, "__defaults__", before))
    UNDO.append(lambda: setattr(function, "__kwdefaults__", keyword))
    function.__defaults__, function.__kwdefaults__ = (5.0,), {"shift": -1.0}


probe("defaults bound anew", other_defaults)(WithDefaults)


def with_partial() -> nn.Module:
    class Model(Base):
        def forward(self, x):
            return self.function(self.chain(x))

    model = Model()
    model.function = functools.partial(torch.mul, other=2.0)
    return model


probe("partial", assign("function", functools.partial(torch.mul, other=-1.0)))(with_partial)


def with_lambda() -> nn.Module:
    class Model(Base):
        def forward(self, x):
            return self.function(self.chain(x))

    model = Model()
    model.function = lambda y: y * 2
    return model


probe("lambda", assign("function", lambda y: y - 2))(with_lambda)


def other_method(m: nn.Module) -> None:
    cls = type(m)
    before = cls.chain
    UNDO.append(lambda: setattr(cls, "chain", before))
    cls.chain = lambda self, x: before(self, x) * 3


@forward("method of the class replaced", other_method)
def _(self, x):
    return self.chain(x)


def other_forward(m: nn.Module) -> None:
    m.norm.forward = lambda h: h * 3


@forward("forward of a layer replaced", other_forward)
def _(self, x):
    return self.chain(x)


def other_class_forward(m: nn.Module) -> None:
    before = Sub.forward
    UNDO.append(lambda: setattr(Sub, "forward", before))
    Sub.forward = lambda self, y: y * 10


@forward("forward of a child's class replaced", other_class_forward)
def _(self, x):
    return self.sub(self.chain(x))


class Heir(Base):
    """Has forward, chain and what follows from what it inherits from."""

    @property
    def factor(self) -> float:
        return 2.0

    @staticmethod
    def twice(y: Tensor) -> Tensor:
        return y * 2

    def forward(self, x):
        return self.twice(self.chain(x)) * self.factor


def shadowed(name: str, value: Any) -> Step:
    """The model's class, which is its alone, begins to shadow what it inherits."""
    return lambda m: setattr(type(m), name, value)


for _name, _value in {
    "chain": lambda self, x: Base.chain(self, x) * 3,
    "factor": property(lambda self: 5.0),
    "twice": staticmethod(lambda y: y * 7),
    "forward": lambda self, x: self.chain(x) * 11,
}.items():
    probe(f"{_name} shadowed by an heir", shadowed(_name, _value))(
        lambda: type("Fresh", (Heir,), {})()
    )


class ByNames(Base):
    act, scale = torch.sin, 2.0

    def chain_of(self, x):
        return self.chain(x)

    def forward(self, x):
        y = getattr(self, f"chain_{'of'}")(x)
        return (y if self.act is torch.sin else self.act(y)) * self.scale


for _name, _value in {
    "act": torch.tanh,
    "scale": 5.0,
    "chain_of": functools.partial(torch.mul, other=3.0),
}.items():
    probe(f"{_name} shadowed by what is no function", shadowed(_name, _value))(
        lambda: type("Fresh", (ByNames,), {})()
    )
probe("other builtin", shadowed("act", torch.tanh), shadowed("act", torch.cos))(
    lambda: type("Fresh", (ByNames,), {"act": torch.sin})()
)


class OwnNorm(nn.GroupNorm):
    def forward(self, x):
        return self.twice(super().forward(x))

    def twice(self, y):
        return y * 2


def of_own_classes() -> nn.Module:
    """A model whose Linear and norm are of classes that are its alone."""

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.fc.__class__ = type("Fc", (nn.Linear,), {})
            self.norm.__class__ = type("Norm", (OwnNorm,), {})

        def forward(self, x):
            return self.chain(x)

    return Model()


def in_class(layer: str, name: str, value: Any) -> Step:
    return lambda m: setattr(type(getattr(m, layer)), name, value)


def other_code(m: nn.Module) -> None:
    """As reloading a module does, within the functions that there are."""
    function = OwnNorm.twice
    before = function.__code__
    UNDO.append(lambda: setattr(function, "__code__", before))
    function.__code__ = (lambda self, y: y * 9).__code__


def twice_own(self: Any, name: str) -> Any:
    found = nn.Module.__getattr__(self, name)
    return found * 2 if name == "weight" else found


for _layer, _name, _value in (
    ("fc", "__call__", lambda self, x: nn.Linear.__call__(self, x) * -2),
    ("fc", "weight", property(lambda self: self._parameters["weight"] * 2)),
    ("fc", "__getattr__", twice_own),
    ("norm", "eps", property(lambda self: 3.0)),
    ("norm", "num_groups", property(lambda self: 1)),
    ("norm", "twice", classmethod(lambda cls, y: y * 5)),
):
    probe(f"{_name} of a class of {_layer}", in_class(_layer, _name, _value))(of_own_classes)
probe("code of a method", other_code)(of_own_classes)


def other_root_forward(m: nn.Module) -> None:
    m.forward = types.MethodType(lambda self, x: self.chain(x) * 4, m)


@forward("own forward replaced", other_root_forward)
def _(self, x):
    return self.chain(x)


# Side effects.


@forward("attribute counted", lambda m: m.calls, lambda m: m.calls)
def _(self, x):
    self.calls += 1
    return self.chain(x) * self.calls


@forward("global list", lambda m: len(COUNTER), lambda m: len(COUNTER))
def _(self, x):
    COUNTER.append(x.shape[0])
    return self.chain(x)


@forward("namespace counted", lambda m: STATE.seen, lambda m: STATE.seen)
def _(self, x):
    STATE.seen += 1
    return self.chain(x)


@forward("value kept", lambda m: m.log[-1], lambda m: m.log[-1])
def _(self, x):
    h = self.fc(x)
    self.log.append(h.detach())
    return self.norm(h)


@forward("attribute of a child set", lambda m: m.sub.last)
def _(self, x):
    self.sub.last = self.chain(x)
    return self.sub.last * 2


@forward("attribute deleted", lambda m: hasattr(m, "extra"))
def _(self, x):
    self.extra = 1
    y = self.chain(x) * self.extra
    del self.extra
    return y


@forward("buffer counted", lambda m: m.sub.count.clone())
def _(self, x):
    if "count" not in self.sub._buffers:
        self.sub.register_buffer("count", torch.zeros(()))
    self.sub.count += 1
    return self.chain(x) * self.sub.count


@forward("input changed in place")
def _(self, x):
    x = x.clone()
    h = self.norm(self.fc(x * 2))
    y = x.detach()
    y.mul_(2)
    return self.norm(h), F.relu(y)


@forward("residual changed in place after")
def _(self, x):
    r = torch.ones(x.shape[0], N, dtype=x.dtype) * 2
    y = self.norm(self.fc(x) + r)
    r.add_(1)
    return y, r


@forward("residual changed in place before the sum")
def _(self, x):
    r = torch.ones(x.shape[0], N, dtype=x.dtype)
    h = self.fc(x)
    r.mul_(3)
    return self.norm(h + r)


@forward("view of the result changed in place")
def _(self, x):
    h = self.norm(self.fc(x))
    h[:, 0].mul_(0)
    return F.relu(h)


@forward("alias of a value changed in place")
def _(self, x):
    h = self.fc(x)
    v = h.view(-1)
    v.add_(1)
    return self.norm(h)


@forward("in place on the chain")
def _(self, x):
    h = self.fc(x)
    kept = h
    h += 1
    h = self.norm(h)
    h.mul_(2)
    h.sub_(0.5)
    return F.leaky_relu(h, 0.1, inplace=True) + kept


@forward("another tensor takes the sum in place")
def _(self, x):
    r = torch.zeros(x.shape[0], N, dtype=x.dtype)
    r += self.norm(self.fc(x))
    return r.relu()


@forward("weight changed after use in one call")
def _(self, x):
    y = self.norm(self.fc(x.detach()))
    with torch.no_grad():
        self.fc.weight.mul_(1.5)
    return y.detach(), self.norm(self.fc(x))


@forward("printed", noop)
def _(self, x):
    print(end="")
    return self.chain(x)


@forward("warned", noop)
def _(self, x):
    h = self.fc(x)
    warnings.warn("said by the model", stacklevel=1)
    return self.norm(h)


@forward("weak references and ids")
def _(self, x):
    return self.chain(x) * (2 if weakref.ref(self)() is self else 3)


# Branches.


@forward("branch on values")
def _(self, x):
    h = self.norm(self.fc(x))
    return h if h.sum() > 0 else -h


@forward("branch on an item")
def _(self, x):
    h = self.norm(self.fc(x))
    return h * x.abs().max().item() if x[0, 0].item() > 0 else h


@forward("branch on the shape")
def _(self, x):
    return self.chain(x) if x.shape[0] > 3 else self.chain(x) * 2


@forward("loop over values")
def _(self, x):
    for _ in range(int(x[0, 0].abs().item()) + 1):
        y = self.chain(x)
    return y


@forward("try and except")
def _(self, x):
    try:
        if x.sum() > 1e9:
            raise ValueError("too large")
        return self.chain(x)
    except ValueError:
        return x


@forward("generator")
def _(self, x):
    return sum(self.chain(part) for part in x.split(2))[:1] if False else self.chain(x)


@forward("dict of outputs")
def _(self, x):
    y = self.chain(x)
    return collections.OrderedDict(y=y, twice=[y * 2, (x, None)])


@forward("random of Python", lambda m: random.random())
def _(self, x):
    return self.chain(x) * random.random()


@forward("random of numpy", lambda m: np.random.rand())
def _(self, x):
    return self.chain(x) * float(np.random.rand())


@forward("random of torch", lambda m: torch.rand(()))
def _(self, x):
    return self.chain(x) + torch.rand(N, dtype=x.dtype)


@forward("dropout between", lambda m: m.eval() and None, lambda m: m.train() and None)
def _(self, x):
    return self.norm(F.dropout(self.fc(x), 0.5, self.training))


@forward("numpy in between")
def _(self, x):
    return self.chain(x) * float(np.float32(1) / np.float32(3))


@probe("numpy array that counts", lambda m: None, lambda m: m.counts.__imul__(2))
class Counting(Base):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(1)

    def forward(self, x):
        y = self.chain(x)
        self.counts += 1
        within = np.arange(3.0)
        within *= 2
        return y * float(self.counts[0]) + float(within[1])


@probe("truth of a numpy array", lambda m: m.array.__imul__(0), lambda m: m.array.__iadd__(1))
class Deciding(Base):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.ones(1)

    def forward(self, x):
        return self.chain(x) * (2.0 if self.array else 1.0)


@forward("numpy of the input", noop)
def _(self, x):
    y = self.chain(x)
    array = x.detach().numpy()
    array *= 2
    return y


@forward("addcmul", noop)
def _(self, x):
    y = self.chain(x)
    return torch.addcmul(y, y, y, value=0.3)


@forward("set_grad_enabled in between")
def _(self, x):
    with torch.no_grad():
        h = self.fc(x)
    return self.norm(h)


@forward("no_grad around")
def _(self, x):
    with torch.no_grad():
        y = self.chain(x)
    return y + self.fc(x)


@forward("autocast inside")
def _(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = self.fc(x.float() if x.dtype == torch.float32 else x)
    return self.norm(h.to(self.norm.weight.dtype))


@forward("detach in between")
def _(self, x):
    return self.norm(self.fc(x).detach()) + self.fc(x)


@forward("tensor hook")
def _(self, x):
    h = self.fc(x)
    if h.requires_grad:
        h.register_hook(lambda g: g * 2)
    return self.norm(h)


@forward("requires_grad asked")
def _(self, x):
    return self.chain(x) * (2 if self.fc.weight.requires_grad else 3)


PROBES["requires_grad asked"] = (
    PROBES["requires_grad asked"][0],
    (lambda m: m.requires_grad_(False) and None, lambda m: m.requires_grad_(True) and None),
)


@forward("checkpoint inside")
def _(self, x):
    return checkpoint(self.chain, x, use_reentrant=False) * 2


@forward("checkpoint with dropout inside")
def _(self, x):
    def part(x):
        return F.dropout(self.norm(F.dropout(self.fc(x), 0.5)), 0.5)

    return checkpoint(part, x, use_reentrant=False)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 7 * g  # not the derivative: whoever computes that is found out


@forward("autograd function of one's own")
def _(self, x):
    return Cube.apply(self.chain(x))


@forward("vmap inside")
def _(self, x):
    return torch.func.vmap(lambda row: self.norm(self.fc(row[None]))[0])(x)


# Changes of the model.

CHANGES: dict[str, Step] = {
    "eps": assign("norm.eps", 0.5),
    "groups": assign("norm.num_groups", 2),
    "other activation": assign("act", nn.Tanh()),
    "in place activation": assign("act", nn.ReLU(inplace=True)),
    "other norm": lambda m: setattr(m, "norm", nn.LayerNorm(N).double()),
    "wrapped linear": lambda m: setattr(m, "fc", nn.Sequential(m.fc, nn.Softmax(-1))),
    "bias removed": assign("fc.bias", None),
    "norm without parameters": lambda m: m.norm._parameters.update(weight=None, bias=None),
    "parameter replaced": lambda m: setattr(
        m.fc, "weight", nn.Parameter(torch.full((N, K), 0.3, dtype=torch.float64))
    ),
    "data replaced": lambda m: setattr(m.fc.weight, "data", m.fc.weight.data * 3),
    "parameter changed in place": lambda m: m.norm.weight.data.add_(1).sum(),
    "single precision and back": lambda m: m.float().double() and None,
    "weights tied": lambda m: setattr(m.norm, "bias", m.norm.weight),
    "frozen": lambda m: m.fc.requires_grad_(False) and None,
    "loaded": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}) and None,
    "non-contiguous weight": lambda m: setattr(
        m.fc, "weight", nn.Parameter(m.fc.weight.detach().t().contiguous().t())
    ),
    "parametrization": lambda m: parametrize.register_parametrization(m.fc, "weight", Doubling())
    and None,
    "weight norm": lambda m: parametrizations.weight_norm(m.fc) and None,
    "spectral norm": lambda m: parametrizations.spectral_norm(m.fc).double() and None,
    "orthogonal": lambda m: parametrizations.orthogonal(m.fc) and None,
    "pruned": lambda m: prune.l1_unstructured(m.fc, "weight", 0.5) and None,
    "class changed": lambda m: setattr(m.fc, "__class__", type("FSDPLinear", (nn.Linear,), {})),
    "own class changed": lambda m: setattr(
        m, "__class__", type("Tripled", (type(m),), {"forward": lambda s, x: s.chain(x) * 3})
    ),
    "subclass of a norm": lambda m: setattr(
        m.norm, "__class__",
        type("Shifted", (nn.GroupNorm,), {"forward": lambda s, h: nn.GroupNorm.forward(s, h) + 1}),
    ),
    "child added": lambda m: m.add_module("late", nn.Tanh()),
    "half frozen mode": lambda m: m.norm.eval() and None,
}  # fmt: skip


class Doubling(nn.Module):
    def forward(self, w):
        return w * 2


class Changes(Base):
    def forward(self, x):
        y = self.chain(x) * self.gain
        return self.late(y) if hasattr(self, "late") else y


for _name, _change in CHANGES.items():
    probe(_name, _change)(Changes)


def hook(kind: str, path: str, **how: bool) -> tuple[Step, Step]:
    """Steps that add a hook to a module and take it away; how: arguments for its registration."""
    handles: list[Any] = []

    def function(module: nn.Module, *args: Any) -> Any:
        module.hooked = getattr(module, "hooked", 0) + 1
        if kind == "forward":
            return args[-1] * 2
        if kind != "forward_pre":
            return None
        doubled = tuple(a * 2 for a in args[0])
        return (doubled, args[1]) if how else doubled

    def add(m: nn.Module) -> None:
        owner = m.get_submodule(path)
        handles.append(getattr(owner, f"register_{kind}_hook")(function, **how))

    def remove(m: nn.Module) -> Any:
        handles.pop().remove()
        return getattr(m.get_submodule(path), "hooked", 0)

    return add, remove


for _kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
    for _path in ("fc", "norm", ""):
        probe(f"{_kind} hook on {_path or 'the model'}", *hook(_kind, _path))(Changes)


for _kind in ("forward", "forward_pre"):
    for _path in ("fc", "norm", ""):
        _steps = hook(_kind, _path, with_kwargs=True)
        probe(f"{_kind} hook with kwargs on {_path or 'the model'}", *_steps)(Changes)


def same_hook_with_kwargs(path: str) -> tuple[Step, Step]:
    """Steps that add a hook, and add the same function again in its place, to be given kwargs."""
    handles: list[Any] = []

    def function(module: nn.Module, *given: Any) -> Any:
        return given[-1] * len(given)

    def add(m: nn.Module) -> None:
        handles.append(m.get_submodule(path).register_forward_hook(function))

    def add_again(m: nn.Module) -> None:
        handles.pop().remove()
        m.get_submodule(path).register_forward_hook(function, with_kwargs=True)

    return add, add_again


if TorchVersion(torch.__version__) >= "2.11":  # Dynamo itself does not look before
    for _path in ("fc", "norm", ""):
        _steps = same_hook_with_kwargs(_path)
        probe(f"the same hook, now with kwargs, on {_path or 'the model'}", *_steps)(Changes)


@probe("hooks counted", lambda m: m.unused.register_forward_hook(print, with_kwargs=True).id > 0)
class CountsHooks(Base):
    def __init__(self):
        super().__init__()
        self.unused = nn.Identity()

    def forward(self, x):
        return self.chain(x) * (1 + len(self.unused._forward_hooks_with_kwargs))


class WithSlot(Base):
    __slots__ = ("scale",)

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "scale", 2.0)

    def forward(self, x):
        return self.chain(x) * self.scale


probe("slot of the model", lambda m: setattr(m, "scale", 3.0))(WithSlot)


class Held(Config):
    """A class that is read below another object."""


@probe("class in a class attribute", world(Held, "SCALE", 3.0))
class HoldsClass(Base):
    HELD = Held

    def forward(self, x):
        return self.chain(x) * self.HELD.SCALE


@probe("class in a tuple", world(Held, "SCALE", 5.0))
class HoldsTuple(Base):
    def __init__(self):
        super().__init__()
        self.held = (Held,)

    def forward(self, x):
        return self.chain(x) * self.held[0].SCALE


@probe("Python module in a class attribute", world(MODULE, "gain", 6.0))
class HoldsModule(Base):
    HELD = MODULE

    def forward(self, x):
        return self.chain(x) * self.HELD.gain


@probe("hasattr of a class", lambda m: setattr(m.held, "more", 1))
class AsksClass(Base):
    def __init__(self):
        super().__init__()
        self.held = type("Bare", (), {})

    def forward(self, x):
        return self.chain(x) * (2 if hasattr(self.held, "more") else 3)


@probe("dict of the model's class changed", lambda m: m.factors.update(two=2.0))
class HasDict(Base):
    factors: dict[str, float] = {"one": 1.0}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        type(self).factors.pop("two", None)

    def forward(self, x):
        return self.chain(x) * len(self.factors)


@probe("global dict bound anew", lambda m: world(sys.modules[__name__], "GAINS", {"one": 5.0})(m))
class ReadsGlobalDict(Base):
    def forward(self, x):
        return self.chain(x) * GAINS["one"]


@probe("attribute of an OrderedDict", lambda m: setattr(m.ordered, "flag", 5.0))
class ReadsOrderedDict(Base):
    def __init__(self):
        super().__init__()
        self.ordered = collections.OrderedDict(one=2.0)
        self.ordered.flag = 2.0

    def forward(self, x):
        return self.chain(x) * self.ordered.flag * self.ordered["one"]


GAINS = {"one": 2.0}
SHARED = nn.Identity()
SHARED.first, SHARED.second = 2.0, 3.0


def reads_shared(y: Tensor) -> Tensor:
    return y * SHARED.first


@probe(
    "one global by two names",
    world(SHARED, "first", 5.0),
    world(SHARED, "second", 7.0),
)
class ReadsShared(Base):
    def forward(self, x):
        return sys.modules[__name__].SHARED.second * reads_shared(self.chain(x))


@probe(
    "two names of one module, then of two",
    lambda m: setattr(m, "other", nn.LeakyReLU(0.5)),
)
class HasAlias(Base):
    def __init__(self):
        super().__init__()
        self.one = self.other = nn.LeakyReLU(0.5)

    def forward(self, x):
        return self.other(self.one(self.chain(x))) * (2 if self.one is self.other else 3)


@probe("tag of a parameter", lambda m: setattr(m.fc.weight, "tag", 1))
class AsksParameter(Base):
    def forward(self, x):
        return self.chain(x) * (2 if hasattr(self.fc.weight, "tag") else 3)


def hook_of_buffers() -> tuple[Step, Step]:
    handles: list[Any] = []
    register = nn.modules.module.register_module_buffer_registration_hook
    return (
        lambda m: handles.append(register(lambda module, name, buffer: buffer * 3)),
        lambda m: handles.pop().remove(),
    )


@probe("hook of all buffers", *hook_of_buffers())
class RegistersBuffer(Base):
    def forward(self, x):
        y = self.chain(x)
        self.register_buffer("seen", torch.ones(N, dtype=torch.float64), persistent=False)
        return y * self.seen


@probe(
    "names like Dynamo's",
    assign("_global_forward_hooks", 3.0),
    lambda m: m.table.update(__import_gain=4.0),
    world(MODULE, "_global_forward_hooks", 5.0),
    lambda m: m.table.update(__import_gain=MODULE),
)
class NamesLikeDynamos(Base):
    _global_forward_hooks = 2.0

    def __init__(self):
        super().__init__()
        self.table["__import_gain"] = 1.0

    def forward(self, x):
        given = self.table["__import_gain"]
        given = given if isinstance(given, float) else given.gain
        return self.chain(x) * self._global_forward_hooks * MODULE._global_forward_hooks * given


def global_hook() -> tuple[Step, Step]:
    handles: list[Any] = []
    seen: list[str] = []

    def add(m: nn.Module) -> None:
        seen.clear()
        register = nn.modules.module.register_module_forward_hook
        handles.append(register(lambda module, i, o: seen.append(type(module).__name__)))

    def remove(m: nn.Module) -> Any:
        handles.pop().remove()
        return list(seen)

    return add, remove


probe("hook of all modules", *global_hook())(Changes)


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """Put the world back: the second run starts where the first did."""
    counted = [Config.calls, STATE.seen, dict(Config.flags), len(COUNTER)]
    try:
        yield
    finally:
        while UNDO:
            UNDO.pop()()
        Config.calls, STATE.seen = counted[0], counted[1]
        Config.flags.clear()
        Config.flags.update(counted[2])
        del COUNTER[counted[3] :]


def call(model: nn.Module, x: Tensor) -> list[Any]:
    """Outputs and gradients of one call."""
    x = x.clone().requires_grad_()
    outputs = pytree.tree_leaves(model(x))
    losses = [t.double().square().sum() for t in outputs if isinstance(t, Tensor) and t.grad_fn]
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    gradients: list[Any] = []
    if losses:
        gradients = list(torch.autograd.grad(sum(losses), wanted, allow_unused=True))
    return [*outputs, *gradients]


def run(
    make: Callable[[], nn.Module], steps: tuple[Step, ...], fuse: bool, times: int = 1
) -> list[Any]:
    """Everything that can be seen of calls before, between and after the steps."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    defaults = make.forward.__defaults__ if isinstance(make, type) else None
    if defaults and isinstance(defaults[0], list):
        defaults[0].clear()
    model = make().double()
    for p in model.parameters():
        nn.init.normal_(p)
    if fuse:
        epinorm.fuse(model, strategy="reference")  # what is asked here is Python, not kernels
    x = torch.randn(ROWS, K, dtype=torch.float64)
    seen: list[Any] = []
    masks = contextlib.nullcontext() if fuse else own_masks()
    with undone(), warnings.catch_warnings(), masks:
        warnings.simplefilter("ignore")
        for step in (lambda m: None, *steps):
            seen += [step(model)]
            for _ in range(times):
                seen += call(model, x)
        if not steps:
            seen += call(model, x[:2])
        seen += [model.state_dict(), model.training]
        model.zero_grad()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBES)
def test_fused_does_what_the_model_does(name: str) -> None:
    check(name)


def check(name: str, times: int = 1) -> None:
    make, steps = PROBES[name]
    expected, got = (run(make, steps, fuse, times) for fuse in (False, True))
    expected, got = pytree.tree_leaves(expected), pytree.tree_leaves(got)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        else:
            assert a == b


class AlwaysUsed:
    """Calls that are told to be ours, though PyTorch computes them here."""

    numbers = itertools.count()
    count = property(lambda self: next(self.numbers), lambda self, _: None)


@pytest.fixture
def native_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each call by Python the next one is native code's, if it can be."""
    assert native(wait=True) is not None
    monkeypatch.setattr(native_calls, "WORTH", ("cpu",))
    monkeypatch.setattr(rewriting, "Uses", AlwaysUsed)
    monkeypatch.setattr(unchanged, "only_call", lambda _: None)  # whose kernels are not here
    fusing: Any = sys.modules["epinorm.capture.fuse"]
    look = fusing.Fused.run_captured

    def run_captured(self: Any, *given: Any, **kwargs: Any) -> Any:
        self.calls.by_python = fusing._FIRST_LOOK - 1
        return look(self, *given, **kwargs)

    monkeypatch.setattr(fusing.Fused, "run_captured", run_captured)


@pytest.mark.slow
@pytest.mark.usefixtures("native_at_once")
@pytest.mark.parametrize("name", PROBES)
def test_native_code_looks_at_all_that_guards_do(name: str) -> None:
    check(name, times=3)


def branch(holds: Callable[..., bool]) -> type[Base]:
    class Branches(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(ROWS, K))

        def forward(self, *inputs: Tensor) -> Tensor:
            return self.chain(sum(inputs)) * (2 if holds(self, *inputs) else 3)

    return Branches


def tensor(rows: int = ROWS) -> Tensor:
    return torch.linspace(-1, 1, rows * K, dtype=torch.float64).reshape(rows, K)


def tagged() -> Tensor:
    made = tensor()
    made.scale = 1.0  # type: ignore[attr-defined]
    return made


ONE = tensor()
INPUTS: dict[str, tuple[Callable[..., bool], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a parameter": (
        lambda m, x: isinstance(x, nn.Parameter),
        lambda m: (tensor().requires_grad_(),),
        lambda m: (nn.Parameter(tensor()),),
    ),
    "the model's buffer": (
        lambda m, x: x is m.seen,
        lambda m: (tensor(),),
        lambda m: (m.seen,),
    ),
    "one tensor twice": (
        lambda m, a, b: a is b,
        lambda m: (tensor(), tensor()),
        lambda m: (ONE, ONE),
    ),
    "other strides of one row": (
        lambda m, x: x.stride(0) == K,
        lambda m: (tensor(1),),
        lambda m: (torch.ones(100, dtype=torch.float64).as_strided((1, K), (100, 1)),),
    ),
    "an attribute": (
        lambda m, x: hasattr(x, "scale"),
        lambda m: (tensor(),),
        lambda m: (tagged(),),
    ),
    "fewer": (
        lambda m, *inputs: len(inputs) == 2,
        lambda m: (tensor(), tensor()),
        lambda m: (tensor(),),
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("native_at_once")
@pytest.mark.parametrize("name", INPUTS)
def test_native_code_looks_at_inputs_as_guards_do(name: str) -> None:
    holds, before, after = INPUTS[name]
    model = branch(holds)().double()
    fused = epinorm.fuse(copy.deepcopy(model))
    for inputs in (before, before, before, after, before, after):
        torch.testing.assert_close(fused(*inputs(fused)), model(*inputs(model)))


@pytest.mark.usefixtures("native_at_once")
def test_an_error_within_a_graph_is_raised_once() -> None:
    class Counts(Base):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, K)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return self.chain(self.table(x))

    fused = epinorm.fuse(Counts())
    for _ in range(4):
        fused(torch.arange(5))
    with pytest.raises(IndexError):
        fused(torch.arange(5) + 7)
    assert fused.count == 5


@pytest.mark.usefixtures("native_at_once")
def test_checkpointing_stops_a_graph_early() -> None:
    fused, x = epinorm.fuse(Base()), torch.randn(ROWS, K, requires_grad=True)
    for _ in range(4):
        fused(x)
    checkpoint(fused, x, use_reentrant=False).sum().backward()
    (found,) = torch.autograd.grad(fused(x).sum(), x)
    torch.testing.assert_close(x.grad, found)


@pytest.mark.slow
@pytest.mark.usefixtures("native_at_once")
def test_more_inputs_than_there_is_room_for() -> None:
    class Many(Base):
        def __init__(self) -> None:
            super().__init__()
            self.factors = nn.ParameterList([nn.Parameter(torch.ones(N)) for _ in range(300)])

        def forward(self, x: Tensor) -> Tensor:
            y = self.chain(x)
            for factor in self.factors:
                y = y * factor
            return y

    fused, one = epinorm.fuse(Many()), nn.Parameter(torch.ones(N))
    x = torch.randn(ROWS, K)
    with torch.no_grad():
        expected = fused(x)
        for i in range(300):
            fused.factors[i] = one
        for _ in range(3):
            torch.testing.assert_close(fused(x), expected)


@pytest.mark.usefixtures("native_at_once")
def test_a_look_never_costs_the_call() -> None:
    class ReadsTable(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.chain(x) * TABLE

    fused = epinorm.fuse(ReadsTable())
    for _ in range(4):
        fused(torch.randn(ROWS, K))


TABLE = torch.full((N,), 2.0)
