"""A GPT-2 in PyTorch as a peer: trains on random tokens and prints the seconds of each step.

Linear layers are PyTorch's under BF16 autocast or in FP32, or with --microxcaling Microsoft's emulation of MXFP8 (its CPU
path).
Attention is scaled_dot_product_attention, the optimizer fused AdamW: what PyTorch is fastest with.
"""

import argparse
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, channels, heads, linear):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.projection = linear(channels, 3 * channels), linear(channels, channels)
        self.up, self.down = linear(channels, 4 * channels), linear(4 * channels, channels)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for t in self.qkv(self.norm1(x)).split(C, dim=2))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attention.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers, heads, channels, max_seq_len, vocab_size, linear):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, channels), nn.Embedding(max_seq_len, channels)
        self.blocks = nn.ModuleList(Block(channels, heads, linear) for _ in range(layers))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, vocab_size, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def microxcaling_linear(directory, bfloat):
    """Its Linear with E4M3 weights, activations and gradients in blocks of 32, forward and backward."""
    sys.path.insert(0, directory)
    import mx  # of microxcaling

    specs = mx.finalize_mx_specs({"scale_bits": 8, "block_size": 32, "w_elem_format": "fp8_e4m3",
                                  "a_elem_format": "fp8_e4m3", "bfloat": bfloat, "round": "even",
                                  "custom_cuda": False})
    return lambda inputs, outputs: mx.Linear(inputs, outputs, mx_specs=specs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("heads", 12), ("channels", 768), ("vocab-size", 50257), ("batch-size", 4),
                          ("seq-len", 1024), ("steps", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default {default}")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="BF16 autocast, or FP32 throughout")
    parser.add_argument("--microxcaling", metavar="DIR", help="a clone of github.com/microsoft/microxcaling")
    parser.add_argument("--bfloat", type=int, default=0, metavar="BITS",
                        help="what microxcaling rounds what isn't MX to; 0: not at all (default 0)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    autocast = args.dtype == "bf16" and not args.microxcaling
    linear = microxcaling_linear(args.microxcaling, args.bfloat) if args.microxcaling else nn.Linear
    model = GPT(args.layers, args.heads, args.channels, args.seq_len, args.vocab_size, linear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"PyTorch {torch.__version__}, {args.threads} threads, {parameters} parameters", flush=True)
    for step in range(1, args.steps + 1):
        tokens = torch.randint(args.vocab_size, (args.batch_size, args.seq_len + 1))
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: {time.perf_counter() - start:.4f} s, loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
