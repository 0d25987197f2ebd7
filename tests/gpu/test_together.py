"""q, k and v of one tensor are one operation: launches, values and gradients."""

import copy
from functools import partial

import torch
from product_case import matmul_precision
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

import epinorm
from epinorm.backends.prepack import prepacked
from epinorm.capture.backend import compile_graph
from epinorm.tools.accuracy import DRAWS
from epinorm.tools.models import SETTINGS
from epinorm.tools.models.verify import compare_candidate, judge, truth_of

ROWS, WIDTH = 4096, 768  # large enough that each alone is ours too


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        q, k, v = (fc(x).view(*x.shape[:-1], 4, -1).transpose(1, 2) for fc in self.qkv)
        return scaled_dot_product_attention(q, k, v)


def products(model, x):
    """How many products the second call launches; after a first."""
    model(x)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        model(x)
        torch.cuda.synchronize()
    return sum(e.name.startswith("linear_norm") for e in profiled.events())


def test_one_product_for_all():
    torch.manual_seed(0)
    model, setting = Attention().cuda(), SETTINGS["highest"]
    x = torch.randn(16, ROWS // 16, WIDTH, device="cuda")
    fused, draws = epinorm.fuse(copy.deepcopy(model)), []
    with matmul_precision("highest"):
        for seed in range(DRAWS):
            truth = truth_of(model, (x,), setting, True, seed)
            fused.load_state_dict(model.state_dict())
            draws.append(compare_candidate(truth, fused, fused, (x,), setting, True))
        assert judge(draws, setting).reason is None
        with torch.no_grad():
            assert products(fused, x) == 1
            with prepacked(fused):
                assert products(fused, x) == 3


def test_under_autocast_compiled_with_one_launch_for_all_casts():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, setting = Attention().cuda(), SETTINGS["bf16-autocast"]
    x = torch.randn(16, ROWS // 16, WIDTH, device="cuda")
    call = partial(setting.call, torch.compile(model, backend=compile_graph, dynamic=False))
    draws = []
    for seed in range(DRAWS):
        truth = truth_of(model, (x,), setting, True, seed)
        draws.append(compare_candidate(truth, model, call, (x,), setting, True))
    assert judge(draws, setting).reason is None
    call(x)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call(x)
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events()]
    assert sum("multi_tensor_apply" in name for name in names) == 1, names
    cast = [name for name in names if name.startswith("triton") and "to_copy" in name]
    assert len(cast) == 1, cast  # x
