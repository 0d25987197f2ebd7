"""What a model does when an operation of its own raises, it does when fused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epinorm

N, ROWS = 6, 2  # fewer rows than channels: h.T @ h is singular


class Base(nn.Module):
    def __init__(self, sub: nn.Module | None = None) -> None:
        super().__init__()
        self.fc, self.norm, self.sub = nn.Linear(N, N), nn.LayerNorm(N), sub
        self.fc2, self.norm2 = nn.Linear(N, N), nn.LayerNorm(N)
        self.calls = 0
        self.log: list[str] = []

    def singular(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.norm(self.fc(x))
        return h.T @ h

    def rest(self, L: Tensor) -> Tensor:
        return self.norm2(self.fc2(L))


def repaired(A: Tensor) -> Tensor:
    return torch.linalg.cholesky(A + torch.eye(N, dtype=A.dtype))


def factored(A: Tensor) -> Tensor:
    return torch.linalg.cholesky(A)


class Factor(nn.Module):
    def forward(self, A: Tensor) -> Tensor:
        return torch.linalg.cholesky(A)


MODELS: dict[str, Callable[[], nn.Module]] = {}


def forward(function: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Register a model with this forward."""
    name = function.__name__
    MODELS[name] = lambda: type(name, (Base,), {"forward": function})(Factor())
    return function


@forward
def runtime_error(self, x):
    A = self.singular(x)
    try:
        L = torch.linalg.cholesky(A)
    except RuntimeError:
        L = repaired(A)
    return self.rest(L)


@forward
def error_of_torch(self, x):
    A = self.singular(x)
    try:
        return torch.linalg.cholesky(A)
    except torch.linalg.LinAlgError as error:
        self.log.append(type(error).__name__)
        return repaired(A)


@forward
def several_types(self, x):
    A = self.singular(x)
    try:
        return torch.linalg.cholesky(A)
    except (ValueError, RuntimeError):
        return repaired(A)


@forward
def second_clause(self, x):
    A = self.singular(x)
    try:
        return torch.linalg.cholesky(A)
    except KeyError:
        return A
    except Exception:
        return repaired(A)


@forward
def bare(self, x):
    A = self.singular(x)
    try:
        return torch.linalg.cholesky(A)
    except:  # noqa: E722
        return repaired(A)


@forward
def group(self, x):
    A = self.singular(x)
    try:
        L = torch.linalg.cholesky(A)
    except* RuntimeError:
        L = repaired(A)
    return self.rest(L)


@forward
def all_clauses(self, x):
    A = self.singular(x)
    try:
        L = torch.linalg.cholesky(A)
    except RuntimeError:
        L = repaired(A)
        self.log.append("except")
    else:
        self.log.append("else")
    finally:
        self.log.append("finally")
    return self.rest(L)


@forward
def around_another(self, x):
    A = self.singular(x)
    try:
        try:
            return torch.linalg.cholesky(A)
        except KeyError:
            return A
        finally:
            self.log.append("finally")
    except RuntimeError:
        return repaired(A)


@forward
def returns_in_finally(self, x):
    L = A = self.singular(x)
    try:
        L = torch.linalg.cholesky(A)
    finally:
        return L  # noqa: B012


@forward
def raises_another(self, x):
    A = self.singular(x)
    try:
        return torch.linalg.cholesky(A)
    except RuntimeError as error:
        self.log.append("raised")
        raise KeyError("singular") from error


@forward
def suppressed(self, x):
    L = A = self.singular(x)
    with contextlib.suppress(RuntimeError):
        L = torch.linalg.cholesky(A)
    return self.rest(L)


@contextlib.contextmanager
def forgiving(log: list[str]) -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        log.append("forgiven")


@forward
def generator_context(self, x):
    L = A = self.singular(x)
    with forgiving(self.log):
        L = torch.linalg.cholesky(A)
    return L


class Forgiving:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, *_: Any) -> bool:
        return kind is not None and issubclass(kind, RuntimeError)


@forward
def own_context(self, x):
    L = A = self.singular(x)
    with Forgiving():
        L = torch.linalg.cholesky(A)
    return self.rest(L)


@forward
def function_within(self, x):
    A = self.singular(x)
    try:
        return factored(A)
    except RuntimeError:
        return repaired(A)


@forward
def module_within(self, x):
    A = self.singular(x)
    try:
        return self.sub(A)
    except RuntimeError:
        return repaired(A)


def either(A: Tensor) -> Tensor:
    try:
        return factored(A)
    except RuntimeError:
        return repaired(A)


@forward
def handled_within(self, x):
    return self.rest(either(self.singular(x)))


@forward
def in_a_loop(self, x):
    A = self.singular(x)
    for jitter in (0.0, 1e-30, 1.0):
        try:
            return torch.linalg.cholesky(A + jitter * torch.eye(N, dtype=A.dtype))
        except RuntimeError:
            self.log.append(f"{jitter} is too little")
    return A


@forward
def index_error(self, x):
    self.calls += 1
    h = self.norm(self.fc(x))
    try:
        return h[torch.tensor([7])]
    except IndexError:
        return h[torch.tensor([0])]


@forward
def lookup_error(self, x):
    self.calls += 1
    h = self.norm(self.fc(x))
    try:
        return nn.functional.embedding(torch.tensor([7]), h)
    except LookupError:
        return h


@forward
def out_of_memory(self, x):
    self.calls += 1
    h = self.norm(self.fc(x))
    try:
        return h.expand(2**50, *h.shape).contiguous()
    except (torch.cuda.OutOfMemoryError, RuntimeError):
        return torch.cat([h, h])


def call(model: nn.Module, x: Tensor) -> tuple[list[Any], list[Tensor]]:
    """What can be seen of a call, and its tensors."""
    model.zero_grad()
    try:
        y = model(x)
    except Exception as error:
        return [type(error), str(error), model.calls, model.log], []
    y.square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [model.calls, model.log], [y, *gradients]


@pytest.mark.parametrize("name", MODELS)
def test_a_handler_of_the_models_own_handles(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for rows in (ROWS, ROWS, 2 * N, ROWS):  # of as many rows as channels it does not raise
        x = torch.randn(rows, N, dtype=torch.float64)
        (expected, values), (got, fused_values) = call(model, x), call(fused, x)
        assert got == expected
        torch.testing.assert_close(fused_values, values)


def test_what_comes_before_and_behind_is_fused() -> None:
    fused = epinorm.fuse(MODELS["handled_within"](), strategy="reference")
    fused(torch.randn(ROWS, N))
    assert epinorm.explain(fused).fused == 2


class LibraryError(RuntimeError):
    """As einops has one."""


@contextlib.contextmanager
def counting(log: list[str]) -> Iterator[None]:
    try:
        yield
    finally:
        log.append("counted")


class Counting:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


class Tries(Base):
    """To compute under handlers that no operation's error reaches."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.how)(x)

    def other_types(self, x: Tensor) -> Tensor:
        try:
            return self.norm(self.fc(x))
        except (KeyError, AttributeError):
            return x
        except TypeError as error:
            raise ValueError("no tensor") from error

    def of_a_library(self, x: Tensor) -> Tensor:
        try:
            return self.norm(self.fc(x))
        except LibraryError:
            return x

    def at_last(self, x: Tensor) -> Tensor:
        try:
            return self.norm(self.fc(x))
        finally:
            for _ in range(2):
                self.log.append("done")

    def within_contexts(self, x: Tensor) -> Tensor:
        with counting(self.log), Counting(), contextlib.nullcontext(), torch.no_grad():
            return self.norm(self.fc(x))

    def behind(self, x: Tensor) -> Tensor:
        try:
            gain = self.gain
        except Exception:
            gain = 2.0
        return self.norm(self.fc(x)) * gain


@pytest.mark.parametrize(
    "how", ["other_types", "of_a_library", "at_last", "within_contexts", "behind"]
)
def test_no_handler_of_an_operation(how: str) -> None:
    model = Tries(how).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    x = torch.randn(ROWS, N, dtype=torch.float64)
    torch.testing.assert_close(fused(x), model(x))
    assert fused.log == model.log
    assert epinorm.explain(fused).fused == 1
