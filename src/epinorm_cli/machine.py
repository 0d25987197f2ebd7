"""The command line for this machine: ``epinorm info | cache``."""

from __future__ import annotations

import typer

from epinorm_cli import options
from epinorm_cli.options import app, one_sentence

cache_app = typer.Typer(no_args_is_help=False, help="The compiled kernels kept on disk.")
app.add_typer(cache_app, name="cache")


@app.command()
@one_sentence()
def info(as_json: options.Json = False) -> None:
    """Say what is here: Python, torch, GPU, compiler, cache folder, and what is supported."""
    from epinorm.tools.console import out, plain_table, print_json
    from epinorm.tools.environment import facts

    known = facts()
    if as_json:
        print_json(known)
        return
    table = plain_table(show_header=False)
    for name, value in known.items():
        table.add_row(f"[bold]{name}[/]", "–" if value is None else str(value))
    out.print(table)


@cache_app.callback(invoke_without_command=True)
def cache(context: typer.Context) -> None:
    """List the compiled kernels kept on disk; `epinorm cache clear` removes them."""
    if context.invoked_subcommand is None:
        cache_list()


@cache_app.command("list")
@one_sentence()
def cache_list(as_json: options.Json = False) -> None:
    """List the compiled kernels kept on disk."""
    from epinorm.backends import cache as store
    from epinorm.tools.console import out, print_json

    state, entries = store.info(), store.list_entries()
    if as_json:
        kernels = [
            {"entry": e.entry, "arch": e.arch, "bytes": e.size, "path": str(e.path)}
            for e in entries
        ]
        folder = None if state.folder is None else str(state.folder)
        problem = state.problem or state.mistake
        listed = {"folder": folder, "problem": problem, "kernels": kernels}
        print_json(listed)
        return
    if state.problem:
        out.print(f"nothing is kept on disk: {state.problem}", markup=False)
        return
    for entry in entries:
        out.print(f"{entry.size / 1024:8.1f} KB  {entry.arch:8}  {entry.entry}", markup=False)
    out.print(
        f"{len(entries)} kernels in {state.folder}: {state.size / 1e6:.1f} of at most "
        f"{state.limit / 1e6:.0f} MB",
        markup=False,
    )
    if state.mistake:
        out.print(state.mistake, markup=False)


@cache_app.command("clear")
@one_sentence()
def cache_clear() -> None:
    """Remove the compiled kernels kept on disk; they are compiled again when next used."""
    from epinorm.backends import cache as store
    from epinorm.tools.console import out

    out.print(f"removed {store.clear()} kernels from {store.info().folder}", markup=False)
