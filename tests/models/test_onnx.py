"""What ``torch.onnx.export`` makes of a fused model: the plain model's graph, by `-m models`."""

from pathlib import Path

import pytest
import torch
from torch import nn

import epinorm

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fused_model_is_exported_as_the_plain_one(tmp_path: Path, dynamo: bool) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU()).eval()
    fused, x = epinorm.fuse(nn.Sequential(*model)), torch.randn(2, 16)
    fused(x)
    path = tmp_path / "model.onnx"
    torch.onnx.export(fused, (x,), str(path), dynamo=dynamo)
    graph = onnx.load(path)
    assert {node.domain for node in graph.graph.node} == {""}  # ONNX's own operations alone
    (y,) = ReferenceEvaluator(graph).run(None, {graph.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x))
    assert epinorm.explain(fused).rows  # still fused
