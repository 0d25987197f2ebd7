"""Every way of setting the precision of fp32 products, one after the other and mixed.

Each case runs in a process of its own: the settings are global, and mixing PyTorch's old and new
interface leaves a state in which reading the old one raises.
"""

import itertools
import json
import os

import pytest
import torch

from epinorm.precision import fp32_precision, product_precision
from processes import Process

SCRIPT = """
import json, os, warnings
import torch
from epinorm.precision import fp32_precision
warnings.simplefilter("ignore")
cublas = torch.backends.cuda.matmul
set_ = {
    "old": torch.set_float32_matmul_precision,
    "allow": lambda v: setattr(cublas, "allow_tf32", v == "1"),
    "new": lambda v: setattr(cublas, "fp32_precision", v),
    "all": lambda v: setattr(torch.backends, "fp32_precision", v),
}
found = []
for case in json.loads(os.environ["CASES"]):
    cublas.fp32_precision = torch.backends.fp32_precision = "none"
    for step in case:
        name, value = step.split("=")
        set_[name](value)
    try:
        torch.get_float32_matmul_precision()
        raised = False
    except RuntimeError:
        raised = True
    found.append([fp32_precision(), cublas.fp32_precision, raised])
print(json.dumps(found))
"""

# What each setting alone means. The last one that was set for products themselves holds.
MEANING = {
    "old=highest": "highest",
    "old=high": "high",
    "old=medium": "high",
    "allow=0": "highest",
    "allow=1": "high",
    "new=ieee": "highest",
    "new=tf32": "high",
}
ALL = ["all=ieee", "all=tf32", "all=bf16"]


def _run(cases):
    process = Process(SCRIPT, {**os.environ, "CASES": json.dumps(cases)})
    out, err = process.communicate(200)
    assert process.returncode == 0, err
    return json.loads(out)


def test_the_last_setting_of_products_holds_whatever_came_before():
    cases = [
        list(case)
        for length in (1, 2, 3)
        for case in itertools.product([*MEANING, *ALL], repeat=length)
        if case[-1] in MEANING
    ]
    found = _run(cases)
    wrong = [
        (case, ours)
        for case, (ours, _, _) in zip(cases, found, strict=True)
        if ours != MEANING[case[-1]]
    ]
    assert not wrong
    # The cases do hold some in which PyTorch's old interface cannot answer.
    assert any(raised for _, _, raised in found)


def test_products_without_a_setting_take_the_general_one():
    found = _run([[], ["all=tf32"], ["all=ieee"], ["all=bf16"]])
    assert [ours for ours, _, _ in found] == ["highest", "high", "highest", "highest"]


def test_it_agrees_with_pytorch_new_interface_everywhere():
    steps = [*MEANING, *ALL]
    for ours, pytorch, _ in _run([list(c) for c in itertools.product(steps, repeat=2)]):
        assert ours == ("high" if pytorch == "tf32" else "highest")


@pytest.mark.parametrize("setting,expected", [("highest", "highest"), ("high", "high")])
def test_only_fp32_on_cuda_depends_on_the_setting(setting, expected):
    torch.set_float32_matmul_precision(setting)
    assert fp32_precision() == expected
    assert product_precision(torch.float32, "cuda") == expected
    assert product_precision(torch.float32, "cpu") == "highest"
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert product_precision(dtype, "cuda") == "native"


@pytest.mark.parametrize("sizes", [(1, 64, 64), (64, 1, 64), (64, 64, 1)])
def test_a_single_row_column_or_term_is_not_rounded_to_tf32(sizes):
    """PyTorch does not: one plane's error would be a thousand times eager's."""
    torch.set_float32_matmul_precision("high")
    assert product_precision(torch.float32, "cuda", sizes) == "highest"
    assert product_precision(torch.float32, "cuda", (2, 2, 2)) == "high"
