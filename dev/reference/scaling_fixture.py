#!/usr/bin/env python3
"""Writes dev/test/fixtures/scalings.npz: what Transformer Engine's and torchao's references make of a matrix.

Transformer Engine's reference quantizers are Python, but importing the package needs its compiled library: the wheel is
unpacked into a directory (--transformer-engine) and its two reference files are run with empty stand-ins for the rest. Its
reference of scales by block is one of its tests' files, which the wheel lacks (--tests: of its repository, at commit
d0067d0da6cb01811b8072a7d304f0e00344ce2b).

    pip install torch==2.15.0 torchao==0.18.0 numpy
    pip download --no-deps transformer_engine==2.20.2 && unzip -d te transformer_engine-2.20.2-py3-none-any.whl
    git clone https://github.com/NVIDIA/TransformerEngine && git -C TransformerEngine checkout d0067d0da6cb
    python3 dev/reference/scaling_fixture.py --transformer-engine te --tests TransformerEngine/tests/pytorch

x (48, 256) is FP32. For each case CASE.values are the elements' values, (48, 256) FP32, CASE.scales the blocks' scales,
by which they decode, and CASE.factor the tensor's (1), where there is one:

    te_nvfp4, te_nvfp4_2d, te_46, te_46_2d   Transformer Engine, 1x16 and 16x16, without and with four over six
    te_nvfp4_columns, te_46_columns          the same, 16x1, which it makes of the transpose
    te_tensor_e4m3, te_tensor_e5m2           Transformer Engine, current scaling
    ao_tensor_e4m3, ao_tensor_e5m2           torchao, dynamic scaling by tensor
    te_block, te_block_columns, te_block_2d  Transformer Engine, blocks of 1x128, 128x1 and 128x128 with powers of two
    te_block_e5m2 and so on                  the same in E5M2
    ao_block, ao_block_columns, ao_block_2d  torchao, the same blocks with FP32 scales, as DeepSeek's
"""

import argparse
import importlib.util
import pathlib
import sys
import types
import unittest.mock

import numpy as np
import torch

OUTPUT = pathlib.Path(__file__).resolve().parents[1] / "test" / "fixtures" / "scalings.npz"


def run_file(root, name):
    path = pathlib.Path(root) / "transformer_engine" / "pytorch" / "custom_recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_reference(root, name):
    """Runs one of Transformer Engine's reference files with stand-ins for what it imports and we don't call."""
    package = "transformer_engine.pytorch"
    for part in ("transformer_engine", package, f"{package}.custom_recipes", f"{package}.quantized_tensor"):
        sys.modules.setdefault(part, types.ModuleType(part))
    sys.modules[f"{package}.quantized_tensor"].QuantizedTensorStorage = object
    sys.modules[f"{package}.quantized_tensor"].Quantizer = object
    recipes = sys.modules[f"{package}.custom_recipes"]
    recipes.gemm = unittest.mock.MagicMock()
    recipes.reference_utils = run_file(root, "reference_utils")
    return run_file(root, name)


def matrix():
    """Rows of magnitudes from 2^-20 to 2^8, with zeros of a whole block, outliers and ties."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(48, 256, generator=generator) * torch.logspace(-6, 2.4, 48)[:, None]
    x[3, 16:48] = 0
    x[5] *= torch.logspace(-3, 3, 256)
    x[16:32, 32:64] = torch.round(x[16:32, 32:64] * 4) / 4
    return x


def nvfp4(reference, x, tile, four_over_six):
    quantizer = reference.NVFP4QuantizerRef
    amax = x.abs().max()
    bound = 256 if four_over_six else 448
    codes, scales = quantizer._quantize_blockwise_reference(
        x, amax, 16, tile, pow_2_scales=False, nvfp4_use_4over6=four_over_six, nvfp4_e4m3_max=bound, eps=0.0
    )
    scales = scales.float()[::tile]
    factor = 1 / (torch.tensor(6.0 * bound) / amax)
    return {"values": reference.cast_from_fp4x2(codes, torch.float32), "scales": scales, "factor": factor.view(1)}


def of_columns(case):
    """What was made of a transpose, the other way round."""
    return case | {key: case[key].T.contiguous() for key in ("values", "scales")}


def tensor_scaled(reference, x, dtype):
    scale, inverse, _ = reference._scale_from_amax_tensor(
        torch.float32, x.abs().max().view(1), dtype, eps=0.0, pow_2_scales=False
    )
    return {"values": (x * scale).to(dtype).float(), "factor": inverse}


def te_blocks(quantizer, x, dtype):
    """Returns what its tests' reference makes of blocks of 1x128, of 128x1, which it makes of the transpose, and of 128x128."""
    how = {"return_transpose": True, "pow_2_scales": True, "munge_scale_shapes": False}
    lines = quantizer.quantize(x, dtype, quant_tile_shape=(1, 128), **how)
    square = quantizer.quantize(x, dtype, quant_tile_shape=(128, 128), **how)
    return {
        "": {"values": lines.data.float(), "scales": lines.scale},
        "_columns": of_columns({"values": lines.data_t.float(), "scales": lines.scale_t}),
        "_2d": {"values": square.data.float(), "scales": square.scale},
    }


def torchao_tensor(x, dtype):
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    made = hp_tensor_to_float8_dynamic(x, dtype, LinearMMConfig())
    # Its GEMMs take the reciprocal.
    return {"values": made._data.float(), "factor": made._scale.reciprocal().view(1)}


def torchao_blocks(x):
    from torchao.prototype.blockwise_fp8_training import kernels

    one, scales = kernels.torch_blockwise_scale_act_quant_lhs(x)
    padded = torch.zeros(128, 256)  # which changes no block's amax
    padded[:48] = x
    two, square = kernels.torch_blockwise_scale_weight_quant(padded)
    columns, scales_of_columns = kernels.torch_blockwise_scale_act_quant_rhs(padded)
    return (
        {"values": one.float(), "scales": scales.contiguous()},
        {"values": two.float()[:48], "scales": square.contiguous()},
        {"values": columns.float()[:48], "scales": scales_of_columns.contiguous()},
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformer-engine", required=True, help="directory that its wheel was unpacked into")
    parser.add_argument("--tests", required=True, help="its repository's tests/pytorch")
    options = parser.parse_args()
    root, x = options.transformer_engine, matrix()
    fp4, current = load_reference(root, "reference_nvfp4"), load_reference(root, "reference_current_scaling")
    cases = {f"te_nvfp4{suffix}": nvfp4(fp4, x, tile, False) for suffix, tile in (("", 1), ("_2d", 16))}
    cases |= {f"te_46{suffix}": nvfp4(fp4, x, tile, True) for suffix, tile in (("", 1), ("_2d", 16))}
    cases["te_nvfp4_columns"], cases["te_46_columns"] = (
        of_columns(nvfp4(fp4, x.T.contiguous(), 1, four_over_six)) for four_over_six in (False, True)
    )
    cases["te_tensor_e4m3"] = tensor_scaled(current, x, torch.float8_e4m3fn)
    cases["te_tensor_e5m2"] = tensor_scaled(current, x, torch.float8_e5m2)
    sys.path.insert(0, options.tests)
    by_block = importlib.import_module("references.blockwise_quantizer_reference").BlockwiseQuantizerReference()
    for suffix, dtype in ("", torch.float8_e4m3fn), ("_e5m2", torch.float8_e5m2):
        cases |= {f"te_block{blocks}{suffix}": case for blocks, case in te_blocks(by_block, x, dtype).items()}
    cases["ao_tensor_e4m3"] = torchao_tensor(x, torch.float8_e4m3fn)
    cases["ao_tensor_e5m2"] = torchao_tensor(x, torch.float8_e5m2)
    cases["ao_block"], cases["ao_block_2d"], cases["ao_block_columns"] = torchao_blocks(x)
    arrays = {f"{name}.{key}": value.numpy() for name, case in cases.items() for key, value in case.items()}
    np.savez_compressed(OUTPUT, x=x.numpy(), **arrays)
    print(f"wrote {OUTPUT}: {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
