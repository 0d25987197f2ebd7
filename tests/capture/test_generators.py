"""What runs later in eager, a generator or an ``async`` function, runs later when fused."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epinorm


class Base(nn.Module):
    def __init__(self, sub: nn.Module | None = None) -> None:
        super().__init__()
        self.fc, self.ln, self.sub = nn.Linear(16, 16), nn.LayerNorm(16), sub

    def chain(self, x: Tensor) -> Tensor:
        return self.ln(self.fc(x)).relu()


class Generator(Base):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield self.chain(x)
        yield self.ln(x)


class Coroutine(Base):
    async def forward(self, x: Tensor) -> Tensor:
        return self.chain(x)


class AsyncGenerator(Base):
    async def forward(self, x: Tensor) -> AsyncIterator[Tensor]:
        yield self.chain(x)
        yield self.ln(x)


class HandsOn(Base):
    def forward(self, x: Tensor) -> Any:
        return self.sub(self.chain(x))


class HandsOnTheRest(Base):
    def forward(self, x: Tensor) -> Any:
        found = self.sub(x)
        return next(found), found


class HasOneInside(Base):
    def forward(self, x: Tensor) -> Any:
        y = self.chain(x)
        return {"y": y, "negative": (-t for t in (y, x))}


class ReadsItself(Base):
    def forward(self, x: Tensor) -> Tensor:
        return sum(self.sub(self.chain(x)))


def values(found: Any) -> list[Tensor]:
    """The tensors of a result, whenever they are computed."""
    if isinstance(found, Tensor):
        return [found]
    if inspect.iscoroutine(found):
        return values(asyncio.run(found))
    if inspect.isasyncgen(found):

        async def read() -> list[Tensor]:
            return [value async for value in found]

        return asyncio.run(read())
    parts = found.values() if isinstance(found, dict) else found
    return [value for part in parts for value in values(part)]


def kinds(found: Any) -> list[type]:
    parts = found.values() if isinstance(found, dict) else found if type(found) is tuple else ()
    return [type(found), *map(type, parts)]


@pytest.mark.parametrize(
    "make",
    [
        Generator,
        Coroutine,
        AsyncGenerator,
        lambda: HandsOn(Generator()),
        lambda: HandsOn(Coroutine()),
        lambda: HandsOnTheRest(Generator()),
        HasOneInside,
        lambda: ReadsItself(Generator()),
    ],
)
def test_computed_when_eager_computes_it(make: Callable[[], nn.Module]) -> None:
    model = make()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    x = torch.randn(4, 16)
    for _ in range(2):
        expected, got = model(x), fused(x)
        assert kinds(got) == kinds(expected)
        with torch.no_grad():  # after the call: seen by what waits, not by what ran
            for each in (model, fused):
                each.ln.bias += 1
        torch.testing.assert_close(values(got), values(expected))
