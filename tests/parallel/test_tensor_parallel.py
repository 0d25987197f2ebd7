"""Blocks split over 2 and 4 processes of a CPU: tensor_worker.py is one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import launcher

pytestmark = pytest.mark.slow

CASES = [
    *("group norm", "layer norm", "rms norm", "sum", "sequences", "read by plain code", "uneven"),
    *("fuse, parallelize_module", "parallelize_module, fuse", "layer norm, fused"),
    *("second derivatives", "watched", "autocast", "one row", "gated", "compiled"),
]
OTHERS = ["float32", "beside", "dropout", "state", "sum alone", "two dimensions", "refused"]
OF_FOUR = ["group norm", "layer norm", "beside", "uneven", "two dimensions"]
CALLS_BESIDE = 48
"""Of the case "beside": a pair's two, four times, with six kinds of rows and norms."""
ROUNDINGS = 16
"""Of sums in another order, in units of the largest value's last place."""
OF_SECOND = 64
"""The same of gradients of gradients, which are sums of such sums: up to 21 with twenty seeds."""


def roundings(case: str) -> int:
    return OF_SECOND if case == "second derivatives" else ROUNDINGS


def unit(case: str) -> float:
    """Of an error's, in fp64 for the most part."""
    return {"beside": 0.5, "float32": 2.0**-24, "autocast": 2.0**-11}.get(case, 2.0**-53)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank, each case."""
    folder = tmp_path_factory.mktemp("ranks")
    return launcher().results_of("tensor_worker.py", 2, folder, "cpu", *CASES, *OTHERS)


def test_outputs_and_gradients_of_four_are_those_of_one_process(tmp_path: Path) -> None:
    for of_rank in launcher().results_of("tensor_worker.py", 4, tmp_path, "cpu", *OF_FOUR):
        for case in OF_FOUR:
            assert of_rank[case]["error"] <= ROUNDINGS * unit(case), case
            assert of_rank[case]["repeats"], case
        assert of_rank["two dimensions"]["fused"] == 2


def test_outputs_and_gradients_are_those_of_one_process(results: Any) -> None:
    for of_rank in results:
        for case in set(CASES) & of_rank.keys():
            assert of_rank[case]["error"] <= roundings(case) * unit(case), case
            assert of_rank[case]["repeats"], case


def test_rows_exchanged_beside_products_give_what_one_process_does(results: Any) -> None:
    for of_rank in results:
        assert of_rank["beside"]["error"] <= ROUNDINGS * unit("beside")
        assert of_rank["beside"]["repeats"]
        assert of_rank["beside"]["asked"] == CALLS_BESIDE


def test_float32_differs_by_roundings_alone(results: Any) -> None:
    for of_rank in results:
        assert of_rank["float32"]["error"] <= ROUNDINGS * unit("float32")
        assert of_rank["float32"]["repeats"]


@pytest.mark.parametrize("case", ["dropout", "state", "sum alone"])
def test_dropout_state_and_absent_gradients(case: str, results: Any) -> None:
    assert all(of_rank[case]["repeats"] for of_rank in results)


def test_collectives_are_counted(results: Any) -> None:
    """A pair's x and its gradient, the sum of products and its, and the gradients of vectors."""
    counts = {"_allgather_base_": 2, "_reduce_scatter_base_": 2, "allreduce_": 1}
    for of_rank in results:
        assert of_rank["watched"]["counts"].items() >= counts.items()


def test_both_chains_are_fused_and_explain_says_how_they_are_split(results: Any) -> None:
    for of_rank in results:
        for case in {"fuse, parallelize_module", "parallelize_module, fuse"} & of_rank.keys():
            columns, rows = of_rank[case]["why"]
            assert of_rank[case]["fused"] == 2
            assert columns.startswith(f"by columns over {len(results)} processes")
            assert rows.startswith(f"by rows over {len(results)} processes")


def test_data_and_tensor_parallel_on_one_mesh(results: Any) -> None:
    for of_rank in results:
        found = of_rank["two dimensions"]
        assert found["error"] <= ROUNDINGS * 2.0**-53
        assert found["fused"] == 2


def test_what_does_not_fit_is_said_and_does_no_harm(results: Any) -> None:
    for of_rank in results:
        uneven, shape, plain = of_rank["refused"]["said"]
        assert uneven.startswith("ValueError: linear.weight of shape [31, 32] cannot be split")
        assert shape.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
        assert plain.startswith("RuntimeError: x is a torch.Tensor beside DTensors")
        assert of_rank["refused"]["error"] <= ROUNDINGS * 2.0**-53
