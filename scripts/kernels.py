"""Print the plan of a chain's training step, and write every kernel that it launches.

    python scripts/kernels.py OUT "add_residual|layer_norm|gelu" 4096 768 3072
    python scripts/kernels.py OUT "group_norm(32)|silu" 512 512 512 --mode float16 --gpu a100

m, k and n: x is (m, k), the weight (n, k). Nothing runs, and the GPU need not be there. OUT gets of
each kernel its text (.cu), PTX, machine code (.cubin) and, where nvdisasm is found, SASS.
--lineinfo: with the lines of the text that instructions come from.
"""

from __future__ import annotations

import argparse
import glob
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from epinorm.backends.cuda.plan.strategy import plan_cuda
from epinorm.backends.cuda.runtime.jit import STANDARD, KernelSource, compile_cubin
from epinorm.backends.cuda.runtime.recorder import recording
from epinorm.chain import Chain
from epinorm.problem import Problem
from epinorm.tools.export.dump import GPUS, MODES, Tables


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("out", type=Path, metavar="OUT")
    made.add_argument("chain")
    for size in "mkn":
        made.add_argument(size, type=int)
    made.add_argument("--mode", choices=list(MODES), default="bfloat16")
    made.add_argument("--gpu", choices=list(GPUS), default="h200")
    made.add_argument("--strategy", default="auto")
    made.add_argument("--lineinfo", action="store_true")
    chosen = made.parse_args(arguments)
    chain, sizes = Chain.parse(chosen.chain), (chosen.m, chosen.k, chosen.n)
    tables = Tables([chosen.gpu], [chosen.mode], chosen.strategy)
    tables.add(chain, *sizes, (True, True, True))
    dtype, precision = MODES[chosen.mode]
    problem = Problem(
        chain, *sizes, *(dtype,) * 3, *(True,) * 3,
        training=True, device=torch.device("cpu"), precision=precision, whole_step=True,
    )  # fmt: skip
    with recording(GPUS[chosen.gpu]):
        print(plan_cuda(problem, chosen.strategy))
    chosen.out.mkdir(parents=True, exist_ok=True)
    for number, source in enumerate(tables.sources, 1):
        write(chosen.out / f"{number}-{source.entry}", source, chosen.lineinfo)
    return 0


def write(base: Path, source: KernelSource, lineinfo: bool) -> None:
    """Its files, and a line of figures."""
    text, cubin = base.with_suffix(".cu"), base.with_suffix(".cubin")
    text.write_text(source.text)
    code = compile_cubin(source)
    print(
        f"{base.name}: {code.registers} registers, {code.spill_bytes} bytes spilled, "
        f"{code.shared_bytes} of static shared memory"
    )
    options = ProgramOptions(name=str(text), arch=source.arch, std=STANDARD, lineinfo=lineinfo)
    machine = Program(source.text, "c++", options).compile("cubin").code if lineinfo else code.cubin
    cubin.write_bytes(bytes(machine))
    base.with_suffix(".ptx").write_bytes(ptx_of(source))
    if (disassembler := nvdisasm()) is not None:
        command = [disassembler, *(["-g"] if lineinfo else []), str(cubin)]
        sass = subprocess.run(command, capture_output=True, check=True).stdout
        base.with_suffix(".sass").write_bytes(sass)


def ptx_of(source: KernelSource) -> bytes:
    """By NVRTC itself: cuda-core asks the driver first, which need not be there."""
    _, program = nvrtc.nvrtcCreateProgram(source.text.encode(), b"kernel.cu", 0, [], [])
    options = [f"--gpu-architecture={source.arch}".replace("sm_", "compute_"), f"-std={STANDARD}"]
    (status,) = nvrtc.nvrtcCompileProgram(program, 2, [option.encode() for option in options])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytes(size)
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.rstrip(b"\0")


def nvdisasm() -> str | None:
    """CUDA's, or the one that Triton brings."""
    beside = Path(sys.prefix, "lib", "*", "site-packages", "triton", "backends", "nvidia", "bin")
    return shutil.which("nvdisasm") or next(iter(glob.glob(f"{beside}/nvdisasm")), None)


if __name__ == "__main__":
    sys.exit(main())
