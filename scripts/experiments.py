"""The questions of doc/experiments.md, each an experiment of compare_recipes.py by name: the recipes that answer it, in
pairs, and what the papers say of it."""

from typing import NamedTuple

from runner import OPERANDS

# Options after --, where they aren't given. cpu: the demo's model and data, hours on two cores; gpu: GPT-2 124M, to
# which data are given.
SCALES = {
    "cpu": {
        "train_data": "build/demo/data/train_*.bin",
        "val_data": "build/demo/data/val_*.bin",
        "layers": 4,
        "heads": 4,
        "channels": 256,
        "max_seq_len": 128,
        "batch_size": 8,
        "max_steps": 500,
        "learning_rate": 1e-3,
        "warmup_steps": 100,
    },
    "gpu": {
        "model": "gpt2-124M",
        "batch_size": 32,
        "max_steps": 10_000,
        "learning_rate": 6e-4,
        "warmup_steps": 500,
    },
}


class Experiment(NamedTuple):
    question: str
    claim: str  # of the papers
    compared: str  # which differences answer it
    recipes: str  # as --recipes takes them
    times: int = 1  # more than 1: all runs a second time, so many times as long


def each_role_down(recipe):
    """Returns pairs of a recipe with one role's scales rounded down, and as it is."""
    return ",".join(f"{recipe}+scale-rounding-{role}=floor:{recipe}" for role in ("weights", "activations", "gradients"))


EXPERIMENTS = {
    "rounding": Experiment(
        "What does the rounding of scales do?",
        "The recipe paper: rounded up (rceil), E4M3 stays within 0.50 % of BF16's perplexity; rounded down (floor), as "
        "the MX specification suggests, the loss is higher or training diverges. Its appendix warns of the naive way "
        "to round up, the exponent of amax itself by ceil(log2 amax), which is the rounding mode ceil: most blocks then "
        "leave the largest binade of the format unused. Neither paper has even, torchao's.",
        "Four roundings of E4M3 and, where fewer bits should show it most, of E2M3, E3M2 and E2M1, each of floor, ceil and "
        "even against rceil.",
        "mxfp8,mxfp8-ocp,mxfp8-ocp:mxfp8,ceil:mxfp8,even:mxfp8," + "".join(
            f"{name}-{rounding}:{name}," for name in ("mxfp6-e2m3", "mxfp6-e3m2", "mxfp4")
            for rounding in ("floor", "ceil", "even")) + "mxfp4",
    ),
    "roles": Experiment(
        "Not rounded up, which tensors' scales hurt?",
        "The recipe paper rounds all alike, and shows gradients in E5M2 with floor diverge or fall behind (section 3.1, "
        "figure 2). The instability paper blames clamped values of gains, and of a small part of the activations. Neither "
        "rounds one role alone.",
        "floor, ceil and even for weights, activations or gradients alone, and floor for all, against rceil for all; E5M2 "
        "gradients under rceil and floor.",
        "floor-weights:mxfp8,floor-activations:mxfp8,floor-gradients:mxfp8,mxfp8-ocp:mxfp8,"
        "ceil-weights:mxfp8,ceil-activations:mxfp8,ceil-gradients:mxfp8,"
        "even-weights:mxfp8,even-activations:mxfp8,even-gradients:mxfp8,"
        "e5m2-gradients:mxfp8,e5m2-gradients-floor:e5m2-gradients",
    ),
    "mxfp4-roles": Experiment(
        "Rounded down in MXFP4, which tensors' scales hurt?",
        "The instability paper blames clamped values, of gains first. The recipe paper has no MXFP4. Neither rounds one role "
        "alone.",
        "floor for weights, activations or gradients alone against rceil for all, with all in E2M1.",
        each_role_down("mxfp4"),
    ),
    "mxfp6-roles": Experiment(
        "Rounded down in MXFP6, which tensors' scales hurt?",
        "The instability paper blames clamped values, of gains first. The recipe paper has no MXFP6. Neither rounds one role "
        "alone.",
        "floor for weights, activations or gradients alone against rceil for all, with all in E3M2.",
        each_role_down("mxfp6-e3m2"),
    ),
    "e5m2-rounding": Experiment(
        "With gradients in E5M2, what does the rounding of scales do?",
        "The recipe paper: with E5M2 gradients and scales rounded down (floor) training diverges or falls behind (section "
        "3.1, figure 2). Of ceil and even neither paper says anything here.",
        "floor, ceil and even for all tensors against rceil, with gradients in E5M2, weights and activations in E4M3.",
        "e5m2-gradients-floor:e5m2-gradients,e5m2-gradients-ceil:e5m2-gradients,e5m2-gradients-even:e5m2-gradients",
    ),
    "formats": Experiment(
        "Which format for which tensor?",
        "The recipe paper: E4M3 for weights, activations and gradients; E5M2 for weights or activations is worse, and at "
        "larger scale for gradients too.",
        "E5M2 in one role at a time against E4M3 everywhere; E2M3, E3M2 and E2M1 everywhere against BF16.",
        "e5m2-weights:mxfp8,e5m2-activations:mxfp8,e5m2-gradients:mxfp8,mxfp6-e2m3,mxfp6-e3m2,mxfp4",
    ),
    "operands": Experiment(
        "Where does quantization hurt?",
        "Of MXFP4 arXiv 2605.09825 finds that wgrad is the culprit. The recipe paper quantizes all operands of all three "
        "GEMMs in E4M3 without a visible loss.",
        "One operand of one GEMM in E2M1, the rest in BF16, and all six in E2M1, against BF16. E2M1 is the coarsest "
        "format: what an operand is sensitive to shows there first. bf16+operand=fprop-x=e2m1 has a linear layer's input X "
        "in E2M1 in the forward GEMM, and in BF16 where wgrad takes it again; fprop-w is the weight there; dgrad makes the "
        "input's gradient of dY and W, wgrad the weight's of dY and X.",
        ",".join(f"bf16+operand={name}=e2m1" for name in OPERANDS) + ",mxfp4",
    ),
    "scalings": Experiment(
        "What does each low-precision recipe that people train with cost?",
        "The recipe paper has MXFP8 alone. arXiv 2509.25149 trains 12B parameters in NVFP4, with a Hadamard transform in "
        "wgrad, stochastic gradients and the last blocks in BF16, and ends at FP8's scores; arXiv 2502.20586 finds MXFP4's "
        "backward pass, transformed and rounded so, nearly lossless. Of MXFP8 in one pass and NVFP4 in the other neither "
        "has a word.",
        "Each against BF16, but NVFP4's variants against the NVFP4 that they add to, and the published one against both; "
        "FP8's scales by block in FP32 also against powers of two.",
        "mxfp8,mxfp6-e2m3,mxfp6-e3m2,mxfp4,mxfp4-sr,fp8-current,fp8-delayed,fp8-blockwise,fp8-blockwise-fp32,"
        "fp8-blockwise-fp32:fp8-blockwise,nvfp4,nvfp4-46:nvfp4,nvfp4-nvidia:nvfp4,nvfp4-published:nvfp4-nvidia,"
        "nvfp4-published,mxfp8-nvfp4,nvfp4-mxfp8",
    ),
    "wgrad": Experiment(
        "In FP4, does a Hadamard transform or stochastic rounding help wgrad?",
        "They disagree. arXiv 2509.25149 needs both for NVFP4. arXiv 2605.09825 finds of MXFP4 that wgrad is what "
        "diverges, that stochastic rounding and random signs don't help, and that fixed signs do.",
        "wgrad's operands alone in E2M1, with MX's scales or with NVFP4's, all else in BF16; the same with a transform of "
        "fixed or of random signs, by 16, with gradients rounded stochastically, and for NVFP4 with fixed signs and these.",
        "wgrad-mxfp4,wgrad-mxfp4-fixed:wgrad-mxfp4,wgrad-mxfp4-random:wgrad-mxfp4,wgrad-mxfp4-stochastic:wgrad-mxfp4,"
        "wgrad-mxfp4-random:wgrad-mxfp4-fixed,wgrad-nvfp4,wgrad-nvfp4-fixed:wgrad-nvfp4,wgrad-nvfp4-random:wgrad-nvfp4,"
        "wgrad-nvfp4-stochastic:wgrad-nvfp4,wgrad-nvfp4-both:wgrad-nvfp4,wgrad-nvfp4-random:wgrad-nvfp4-fixed",
    ),
    "wgrad-operands": Experiment(
        "In FP4, which of wgrad's operands does a Hadamard transform or stochastic rounding help?",
        "arXiv 2509.25149 transforms both of wgrad's operands and rounds dY alone stochastically, in NVFP4. arXiv "
        "2605.09825 finds of MXFP4 that stochastic rounding and random signs don't help, and that fixed signs do.",
        "One of wgrad's operands, dY or X, in E2M1, with MX's scales or with NVFP4's, all else in BF16; the same with a "
        "transform of fixed or of random signs, by 16, of both operands, and with stochastic rounding of the one.",
        ",".join(
            f"wgrad-{operand}-{format}{remedy}" + (f":wgrad-{operand}-{format}" if remedy else "")
            for format in ("mxfp4", "nvfp4") for operand in ("dy", "x")
            for remedy in ("", "-fixed", "-random", "-stochastic")),
    ),
    "weights": Experiment(
        "What does one scale for a square of weights cost, or bring?",
        "The recipe paper has one for 32 elements in a row, and another copy of the weights by columns. arXiv 2509.25149 "
        "has one for 16x16 in NVFP4, so that the forward and the backward pass multiply the same weights, and counts it "
        "among the four things that NVFP4 needs.",
        "One scale for 32x32 weights against one for 32, in E4M3 and in E2M1; and in NVFP4, where squares of 16x16 are the "
        "recipe, one for 16 against them.",
        "2d-weights:mxfp8,mxfp4-2d-weights:mxfp4,nvfp4-1d-weights:nvfp4",
    ),
    "gains": Experiment(
        "Do quantized gains of norms hurt a language model?",
        "The instability paper: in its small proxy, gains that lie close together under a power of two are clamped as "
        "whole blocks under floor, which bends the gradient; of language models it names them as the cause of "
        "divergence. Neither paper rounds them up.",
        "Gains through E4M3 against gains in FP32, under floor and under rceil.",
        "gains:mxfp8,gains-floor:mxfp8-ocp,gains-floor:gains",
    ),
    "length": Experiment(
        "Does the gap grow with the length of training?",
        "The recipe paper: with rceil the gap stays below 0.50 % up to 15T tokens, with floor it opens or training diverges. "
        "The instability paper sees instabilities mainly in larger models that are trained for longer.",
        "The same pairs in runs three times as long, each with a schedule of its own; and the longer run's gap less "
        "the shorter one's, seed by seed.",
        "mxfp8,mxfp8-ocp,mxfp8-ocp:mxfp8,mxfp4",
        times=3,
    ),
}
