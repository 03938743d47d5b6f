"""The Triton backend without a GPU: its kernels under the interpreter and as compiled for Hopper, and its refusals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchfoam import FOAM, backends
from torchfoam.kernels import triton as backend

HERE = Path(__file__).parent
# Triton reads TRITON_INTERPRET when it is imported, so the interpreter has a process of its own
INTERPRETED = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
GROUP = {"rule": "adam", "state": "float32", "level": 2}


def test_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", str(HERE / "triton_cases.py")]
    done = subprocess.run(command, env=INTERPRETED, cwd=HERE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert (passed := re.search(r"(\d+) passed", done.stdout)) and int(passed[1]) > 100, done.stdout[-500:]


def test_the_library_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, torchfoam\n"
        "w = torch.nn.Parameter(torch.ones(4, 4)); w.sum().backward()\n"
        "torchfoam.FOAM([w]).step(); print(torchfoam.backends()['triton'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "triton is not installed" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    assert backends()["triton"] != "ok"
    with pytest.raises(ValueError, match=r"backend 'triton' cannot be used: .*(CUDA|triton)"):
        FOAM([nn.Parameter(torch.ones(4, 4))], backend="triton")


@pytest.mark.parametrize(
    ("p", "group", "reason"),
    [
        (torch.ones(4, 4), {"rule": "muon"}, "no rule 'muon'"),
        (torch.ones(4, 4), {"state": "int8"}, "not state='int8'"),
        (torch.ones(4, 4, dtype=torch.float64), {}, "not torch.float64"),
        (torch.ones(4, 4, device="meta"), {}, "on meta"),
        (torch.ones(4, 6).t(), {}, "not contiguous"),
    ],
)
def test_refusals_name_the_reason(
    p: torch.Tensor, group: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert reason in str(backend.refuses(p, {**GROUP, **group}))
    assert backend.refuses(torch.ones(4, 4), GROUP) is None


def compiled(kernel: str, K: int, BP: int, flat: bool, aligned: bool, dtype: str, step_tensor: bool) -> Any:
    """The kernel as compiled for a Hopper GPU, which needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torchfoam.kernels import triton_adam

    fn = getattr(triton_adam, kernel)
    storage = {"float32": triton.language.float32, "bfloat16": triton.language.bfloat16}[dtype]
    constants = {
        "SLOTS": 256, "K": K, "BP": BP, "FLAT": flat, "ALIGNED": aligned, "P": storage, "G": storage,
        "S": triton.language.float32, "MAXIMIZE": False, "SQUARE_MEAN": False, "STOCHASTIC": True,
        "STEP_TENSOR": step_tensor, "LR_TENSOR": step_tensor,
    }  # fmt: skip
    kinds = {"table": "*i64", "lr": "*fp32" if step_tensor else "fp32", "t": "i32", "seed": "i32"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "fp32") for name in fn.arg_names}
    options = {"num_warps": backend.warps(K * BP), "enable_fp_fusion": True}
    source = ASTSource(fn, signature, constants, attrs={(0,): [["tt.divisibility", 16]]})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(
    ("kernel", "K", "BP", "flat", "aligned", "dtype", "step_tensor"),
    [
        ("adam_tile", backend.TILE, 1, True, True, "float32", False),
        ("adam_tile", backend.TILE // 8, 8, True, True, "bfloat16", True),
        ("adam_tile", backend.TILE // 8, 8, False, False, "float32", False),
        ("adam_tile", 1, backend.LONGEST, False, True, "float32", False),
        ("adam_long", 1, backend.STRIDE, False, True, "bfloat16", False),
    ],
)
def test_hopper_code_has_wide_accesses_and_no_spills(
    kernel: str, K: int, BP: int, flat: bool, aligned: bool, dtype: str, step_tensor: bool, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this build of triton brings no cuobjdump")
    (tmp_path / "kernel.cubin").write_bytes(compiled(kernel, K, BP, flat, aligned, dtype, step_tensor).asm["cubin"])
    dump = subprocess.run([tool, "-sass", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\b(LDL|STL)\b", dump), "registers spill"
    if aligned:
        entries = K * BP // (32 * backend.warps(K * BP))  # of one thread, in each of p and g
        wide = entries // (4 if dtype == "float32" else 8)
        assert len(re.findall(r"\bLDG\.[A-Z.]*128\b", dump)) >= 2 * wide
        assert len(re.findall(r"\bSTG\.[A-Z.]*128\b", dump)) >= wide
