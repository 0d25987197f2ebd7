"""A rewritten ``forward``: code with fused chains, and the conditions under which it holds."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from epinorm.chain import Rounding
from epinorm.problem import Strategy
from epinorm.rewrite.guard import GuardCode, hook_conditions
from epinorm.rewrite.match import Candidate, find
from epinorm.rewrite.site import Site, build_site, load_function
from epinorm.rewrite.spelling import is_dropout, plain_type, target_name
from epinorm.rewrite.trace import TENSOR, Trace, Untraceable, is_simple, same, trace

__all__ = [
    "Parameters",
    "Program",
    "Settings",
    "analyse",
    "compile_program",
    "layers_of",
    "unfused_program",
]

_MISSING = object()


@dataclass(frozen=True)
class Settings:
    """How fused chains are to be computed; see ``epinorm.linear_norm``."""

    strategy: Strategy = "auto"
    strict: bool = False
    rounding: Rounding = "once"


@dataclass(frozen=True)
class Parameters:
    """The parameters of a ``forward`` after self, for binding a call's arguments to them."""

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    keyword_only: int

    @staticmethod
    def of(cls: type[nn.Module]) -> Parameters:
        """Read them off the class; raises Untraceable for ``*args`` and ``**kwargs``."""
        own = list(inspect.signature(cls.forward).parameters.values())[1:]
        for p in own:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                raise Untraceable(f"its forward takes {p}")
        return Parameters(
            tuple(p.name for p in own),
            tuple(_MISSING if p.default is p.empty else p.default for p in own),
            sum(p.kind == p.KEYWORD_ONLY for p in own),
        )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """The value of each parameter; None where the call does not fit the signature."""
        if not kwargs and len(args) == len(self.names) and not self.keyword_only:
            return args
        if len(args) > len(self.names) - self.keyword_only:
            return None
        rest, used = self.names[len(args) :], 0
        values = list(args)
        for name, default in zip(rest, self.defaults[len(args) :], strict=True):
            if name in kwargs:
                used += 1
                values.append(kwargs[name])
            elif default is _MISSING:
                return None
            else:
                values.append(default)
        return tuple(values) if used == len(kwargs) else None

    def defaulted(self) -> dict[str, Any]:
        """The arguments of a call with tensors for all without a default; raises Untraceable."""
        for name, default in zip(self.names, self.defaults, strict=True):
            if default is not _MISSING and not is_simple(default):
                raise Untraceable(f"the default of {name} is a {type(default).__name__}")
        pairs = zip(self.names, self.defaults, strict=True)
        return {name: TENSOR if d is _MISSING else d for name, d in pairs}

    def kinds(self, values: tuple[Any, ...]) -> dict[str, Any] | None:
        """The arguments of a call by name, TENSOR or constant; None if one is neither."""
        pairs = dict(zip(self.names, values, strict=True))
        if any(not isinstance(v, Tensor) and not is_simple(v) for v in pairs.values()):
            return None
        return {name: TENSOR if isinstance(v, Tensor) else v for name, v in pairs.items()}


@dataclass(eq=False)
class Program:
    """``run`` is the rewritten forward, of the module and the tensors among ``arguments``; None:
    this case is for the module's own forward.

    ``accepts``, of the module and the values of its parameters, says whether everything that the
    trace took for granted holds for a call.
    """

    run: Callable[..., Any] | None
    arguments: tuple[Any, ...]
    accepts: Callable[[nn.Module, tuple[Any, ...]], bool]
    reason: str = ""
    _constants: bool = field(init=False)

    def __post_init__(self) -> None:
        self._constants = any(a is not TENSOR for a in self.arguments)

    def __call__(self, root: nn.Module, values: tuple[Any, ...]) -> Any:
        assert self.run is not None
        if self._constants:
            values = tuple([v for v, a in zip(values, self.arguments) if a is TENSOR])  # noqa: B905
        return self.run(root, *values)


@dataclass(frozen=True)
class Analysis:
    """A trace of a module with the chains that it contains."""

    module: nn.Module
    modules: Mapping[str, nn.Module]
    trace: Trace
    candidates: tuple[Candidate, ...]
    training: bool | None
    depends_on_training: bool
    """Whether train() and eval() may lead to different graphs or chains."""

    @property
    def fusable(self) -> list[Candidate]:
        return [c for c in self.candidates if c.obstacle is None]


def analyse(module: nn.Module, arguments: Mapping[str, Any], training: bool | None) -> Analysis:
    """Trace the module and find its chains; raises Untraceable."""
    modules = dict(module.named_modules(remove_duplicate=False))
    found = trace(module, arguments, training)
    candidates = find(found.graph, module, modules, training)
    # Asked here, of the whole graph: fusing takes nodes out of it, a dropout in eval mode too.
    called = {str(n.target) for n in found.graph.nodes if n.op == "call_module"}
    depends = "training" in found.attributes or any(is_dropout(modules[p]) for p in called)
    return Analysis(module, modules, found, tuple(candidates), training, depends)


def layers_of(candidate: Candidate, path: str = "") -> str:
    """The chain's linear layer and norm as a reader finds them, e.g. ``net.0 → net.1``."""
    prefix = f"{path}." if path else ""
    return " → ".join(prefix + _layer_name(n) for n in (candidate.linear, candidate.norm_node))


def _layer_name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    for argument in (*node.args[1:], *node.kwargs.values()):
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            return f"{target_name(node)}({argument.target})"
    return target_name(node)


def _fuse_candidates(
    graph: fx.Graph, candidates: Sequence[Candidate], analysis: Analysis, settings: Settings
) -> None:
    sites = []
    for candidate in candidates:
        where = f"{plain_type(analysis.module).__name__}: {layers_of(candidate)}"
        chain = dataclasses.replace(candidate.chain, rounding=settings.rounding)
        strategy, strict = settings.strategy, settings.strict
        sites.append(build_site(candidate, chain, analysis.modules, where, strategy, strict))
    fused: dict[fx.Node, fx.Node] = {}
    for candidate, (site, inputs) in zip(candidates, sites, strict=True):
        now = [v if isinstance(v, str) else fused.get(v, v) for v in inputs]
        fused[candidate.nodes[-1]] = _replace(graph, candidate, site, now)


def _replace(
    graph: fx.Graph, candidate: Candidate, site: Site, inputs: Sequence[fx.Node | str]
) -> fx.Node:
    """Put one call of ``site`` in the place of the candidate's nodes."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    start = order[candidate.linear]
    early = all(isinstance(v, str) or v.op == "get_attr" or order[v] < start for v in inputs)
    # Where every input is known by then, the linear's place: nothing in between can disturb it.
    with graph.inserting_before(candidate.linear if early else candidate.nodes[-1]):
        values = tuple(_input(graph, v) for v in inputs)
        call = graph.call_function(site, values)
    candidate.nodes[-1].replace_all_uses_with(call)
    for node in reversed(candidate.nodes):
        graph.erase_node(node)
    return call


def _input(graph: fx.Graph, value: fx.Node | str) -> fx.Node:
    """A node for one input of a site, at the graph's current place; a str is a module's path."""
    if isinstance(value, fx.Node):
        if value.op != "get_attr":
            return value
        return graph.create_node("get_attr", str(value.target))
    first, *rest = value.split(".")
    # By way of _modules: nn.Module's own attribute look-up costs a microsecond each time.
    module = graph.call_function(operator.getitem, (graph.get_attr("_modules"), first))
    for name in rest:
        children = graph.call_function(getattr, (module, "_modules"))
        module = graph.call_function(operator.getitem, (children, name))
    return module


def compile_program(analysis: Analysis, settings: Settings) -> Program:
    """Rewrite the analysed graph and note what it holds for."""
    found, module = analysis.trace, analysis.module
    fusable = analysis.fusable
    run = None
    if fusable:
        _fuse_candidates(found.graph, fusable, analysis, settings)
        found.graph.lint()
        run = load_function(found.graph, plain_type(module).__name__)
    arguments = tuple(found.arguments.values())
    obstacles = [c.obstacle for c in analysis.candidates if c.obstacle]
    return Program(run, arguments, _accepts(analysis, arguments), "".join(obstacles[:1]))


def unfused_program(arguments: tuple[Any, ...], reason: str) -> Program:
    """The program of a call with these arguments that cannot be traced."""
    guard = GuardCode("return False")
    _compare_arguments(guard, arguments)
    guard.line("return True")
    return Program(None, arguments, guard.function(("root", "values")), reason)


def _compare_arguments(guard: GuardCode, arguments: tuple[Any, ...]) -> None:
    if not arguments:
        return
    tensor, is_same = guard.value(Tensor), guard.value(same)
    names = [f"v{i}" for i in range(len(arguments))]
    guard.line(f"{', '.join(names)}, = values")
    for name, expected in zip(names, arguments, strict=True):
        if expected is TENSOR:
            guard.refuse_if(f"type({name}) is not {tensor} and not isinstance({name}, {tensor})")
        else:
            is_expected = f"{is_same}({guard.value(expected)}, {name})"
            guard.refuse_if(f"isinstance({name}, {tensor})", f"not {is_expected}")


def _accepts(analysis: Analysis, arguments: tuple[Any, ...]) -> Callable[..., bool]:
    """The condition for a program; see ``Program.accepts``."""
    found = analysis.trace
    guard = GuardCode("return False")
    _compare_arguments(guard, arguments)
    missing, is_same = guard.value(_MISSING), guard.value(same)
    reads = [(f"getattr(root, {name!r}, {missing})", v) for name, v in found.attributes.items()]
    reads += [(f"{guard.value(g)}.get({name!r}, {missing})", v) for g, name, v in found.globals]
    for read, expected in reads:
        value = guard.value(expected)
        guard.line(f"now = {read}")
        guard.refuse_if(f"now is not {value} and not {is_same}(now, {value})")
    paths = _Paths(guard)
    _compare_children(guard, paths, analysis.module, ())
    for path in found.inlined:
        name = paths.name(tuple(path.split(".")))
        guard.refuse_if(*hook_conditions(name))
    if analysis.depends_on_training:
        for path, module in analysis.modules.items():
            if is_dropout(module):
                mode = module.training if analysis.training is None else analysis.training
                name = paths.name(tuple(path.split(".")) if path else ())
                guard.refuse_if(f"{name}.training is not {mode}")
    guard.line("return True")
    return guard.function(("root", "values"))


class _Paths:
    """Local variables for the modules at the paths that a guard looks at."""

    def __init__(self, guard: GuardCode) -> None:
        self._guard = guard
        self._names: dict[tuple[str, ...], str] = {(): "root"}

    def name(self, path: tuple[str, ...]) -> str:
        if path not in self._names:
            children = self.children(path[:-1])
            self._names[path] = f"m{len(self._names)}"
            self._guard.line(f"{self._names[path]} = {children}[{path[-1]!r}]")
        return self._names[path]

    def children(self, path: tuple[str, ...]) -> str:
        """The variable that holds the ``_modules`` of the module at the path."""
        children = (*path, "")
        if children not in self._names:
            owner = self.name(path)
            self._names[children] = f"m{len(self._names)}"
            self._guard.line(f"{self._names[children]} = {owner}._modules")
        return self._names[children]


def _compare_children(
    guard: GuardCode, paths: _Paths, module: nn.Module, path: tuple[str, ...]
) -> None:
    """Names, order and types of the children, of containers' children too."""
    children = module._modules
    name = paths.children(path)
    guard.refuse_if(f"[*{name}] != {guard.value([*children])}")
    if children:
        values = [f"{name}_{i}" for i in range(len(children))]
        guard.line(f"{', '.join(values)}, = {name}.values()")
        types = [guard.value(type(child)) for child in children.values()]
        wrong = [f"type({v}) is not {t}" for v, t in zip(values, types, strict=True)]
        guard.refuse_if(*wrong)
    for child_name, child in children.items():
        if isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            _compare_children(guard, paths, child, (*path, child_name))
