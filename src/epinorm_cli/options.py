"""What the commands share: the app, their options, and what is said when something is wrong."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Fuse the Linears and norms of a PyTorch model, verify the result, time it.",
)


def _version(wanted: bool) -> None:
    """Both versions without importing either, which takes PyTorch's seconds."""
    if not wanted:
        return
    package = find_spec("epinorm")
    assert package is not None
    assert package.origin is not None
    text = Path(package.origin).read_text("utf-8")
    (ours,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not found"
    typer.echo(f"epinorm {ours}, PyTorch {torch}")
    raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit."),
]


@app.callback()
def _epinorm(version: VersionOption = False) -> None:
    pass


INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as shells have it."""

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float64": "float64",
    "fp64": "float64",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
PRECISIONS = ("highest", "high")
STRATEGIES = ("auto", "single", "planes", "epilogue", "cpu", "reference")

_FILE = typer.Argument(
    metavar="FILE", help="Python file that defines Model, get_inputs() and get_init_inputs()."
)
File = Annotated[Path, _FILE]
MaybeFile = Annotated[Path | None, _FILE]
Dtype = Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")]
Precision = Annotated[
    str | None,
    typer.Option(help="fp32 products on CUDA: highest (IEEE, the default) or high (TF32)."),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N; by default the best that is there.")
]
Training = Annotated[
    bool | None,
    typer.Option("--training/--forward", help="Only that pass; by default both."),
]
Scale = Annotated[
    int,
    typer.Option(
        help="Divide every module-level size of FILE (lines such as batch_size = 1024) by this."
    ),
]
Strategy = Annotated[str, typer.Option(help=f"How to compute: {', '.join(STRATEGIES)}.")]
Details = Annotated[bool, typer.Option("--details", help="Show everything that was checked.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]


class UsageError(Exception):
    """Bad input; the message is one sentence."""


class Refusal(Exception):
    """What is asked for cannot be done on this machine; the message is one sentence."""


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Turn whatever a command raises into one sentence on stderr and an exit code."""
    import torch

    from epinorm.tools.console import err, interruptible
    from epinorm.tools.kernelbench.problem import ProblemError
    from epinorm.tools.kernelbench.protocol import NoChainError

    def fail(text: str, code: int) -> typer.Exit:
        if os.environ.get("EPINORM_TRACEBACK"):
            err.print_exception()
        # Escaped: a message may hold [brackets], which rich would read as markup.
        err.print("[bold red]error:[/] ", end="")
        err.print(" ".join(text.split()), markup=False)
        return typer.Exit(code)

    try:
        with interruptible():
            yield
    except (UsageError, ProblemError) as error:
        raise fail(str(error), 2) from error
    except (Refusal, NoChainError) as error:
        raise fail(str(error), 1) from error
    except torch.OutOfMemoryError as error:
        raise fail("out of GPU memory; try a larger --scale or a 16-bit --dtype", 2) from error
    except KeyboardInterrupt as error:
        raise fail("interrupted; no result was written", INTERRUPTED) from error
    except (typer.Exit, BrokenPipeError):  # typer's own: the second ends without a word
        raise
    except Exception as error:
        raise fail(
            f"{error} ({type(error).__name__}; EPINORM_TRACEBACK=1 shows where)", 2
        ) from error


def one_of(option: str, value: str, known: tuple[str, ...] | dict[str, str]) -> str:
    """The value, or what a dict has for it; raises UsageError for one that is not known."""
    if value not in known:
        names = dict.fromkeys(known.values() if isinstance(known, dict) else known)
        raise UsageError(f"{option} must be one of {', '.join(names)}, got {value!r}")
    return known[value] if isinstance(known, dict) else value


def options_of(
    dtype: str, precision: str | None, device: str | None, strategy: str, gpu: str | None = None
) -> tuple[Any, Any, Any, Any]:
    """The options as torch.dtype, precision name, torch.device and strategy; raises UsageError.

    ``gpu``: one that is not here, as if which a model on the CPU is looked at."""
    import torch

    chosen = getattr(torch, one_of("--dtype", dtype, DTYPES))
    where = device_of(device if gpu is None else "cpu")
    one_of("--strategy", strategy, STRATEGIES)
    if precision is not None:
        one_of("--precision", precision, PRECISIONS)
    if precision == "high" and where.type != "cuda" and gpu is None:
        raise UsageError(f"--precision high (TF32) exists on CUDA alone, the device is {where}")
    products = (precision or "highest") if chosen == torch.float32 else "native"
    return chosen, products, where, strategy


def device_of(name: str | None) -> Any:
    """The torch.device of that name, or the best that is there; raises UsageError."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"--device {name}: PyTorch {torch.__version__} sees no CUDA GPU here")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise UsageError(
                f"--device {name}: there are {torch.cuda.device_count()} GPUs, counted from 0"
            )
    return device


def passes_of(training: bool | None) -> tuple[bool, ...]:
    """For each pass to run, whether it is training; both where none is named."""
    return (False, True) if training is None else (training,)
