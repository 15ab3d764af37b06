"""Writes dev/test/fixtures/gpt_*.safetensors, the reference values of test_gpt.cu, with transformers' GPT-2 in FP64.

    python dev/reference/make_fixtures.py

What the files hold, and with which versions they were made: README.md beside this file.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

FIXTURES = Path(__file__).resolve().parent.parent / "test" / "fixtures"
STEPS, WARMUP_STEPS = 10, 3
PEAK_RATE, FINAL_RATE_FRACTION = 3e-3, 0.1
BETA1, BETA2, EPS, WEIGHT_DECAY, GRAD_CLIP = 0.9, 0.95, 1e-8, 0.1, 1.0


def make_model(config, seed):
    """Makes a GPT-2 whose weights are BF16 values, so that files hold them exactly in two bytes."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("weight") and p.ndim == 1:  # gains of layer norms
                p.normal_(1.0, 0.3)
            elif p.ndim == 1:
                p.normal_(0.0, 0.1)
            elif "wte" in name or "wpe" in name:  # small, so that the layer norms' epsilon matters
                p.normal_(0.0, 0.05)
            else:
                p.normal_(0.0, 0.12)
            p.copy_(p.to(torch.bfloat16).to(p.dtype))
    return model.double()


def make_batches(config, B, T, seed):
    """Draws (STEPS, B, T) tokens and targets. Small ids are likelier, so that there is something to
    learn."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand((STEPS, B, T + 1), generator=generator)
    ids = (uniform**2 * config.vocab_size).to(torch.int32).clamp(max=config.vocab_size - 1)
    return ids[..., :-1].contiguous(), ids[..., 1:].contiguous()


def loss_of(model, tokens, targets):
    """Returns logits and mean loss, not by transformers' own loss, which is computed in FP32."""
    logits = model(tokens.long()).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.long().flatten())


def gradients_of(model, tokens, targets):
    model.zero_grad(set_to_none=True)
    logits, loss = loss_of(model, tokens, targets)
    loss.backward()
    return logits.detach(), loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def learning_rate(step):
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    cosine = 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)))
    return PEAK_RATE * (FINAL_RATE_FRACTION + (1 - FINAL_RATE_FRACTION) * cosine)


def train(model, tokens, targets):
    """Trains by AdamW, one batch a step; returns rates, losses and gradient norms before
    clipping."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(BETA1, BETA2), eps=EPS)
    rates, losses, norms = [], [], []
    for step in range(STEPS):
        _, loss, gradients = gradients_of(model, tokens[step], targets[step])
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        for p in model.parameters():  # clip_grad_norm_ divides by norm + 1e-6
            p.grad.mul_(min(1.0, GRAD_CLIP / norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        rates.append(learning_rate(step))
        losses.append(loss)
        norms.append(norm)
    return rates, losses, norms


def check_fp32_agrees(config, weights, tokens, targets, loss, gradients):
    """Checks that FP64 changed precision and nothing else."""
    model = GPT2LMHeadModel(config).eval()
    model.load_state_dict(weights, strict=False)
    model.float()
    _, loss32, gradients32 = gradients_of(model, tokens, targets)
    assert abs(loss32 - loss) < 1e-5, (loss32, loss)
    worst = max(((gradients32[name] - g).abs().max() / g.abs().max()).item() for name, g in gradients.items())
    assert worst < 1e-4, worst
    print(f"  FP32: loss differs by {abs(loss32 - loss):.1e}, gradients by {worst:.1e} of each tensor's largest")


def make_fixture(name, layers, heads, channels, max_seq_len, vocab_size, B, T, seed, largest_final, split):
    config = GPT2Config(
        n_layer=layers,
        n_head=heads,
        n_embd=channels,
        n_positions=max_seq_len,
        vocab_size=vocab_size,
        activation_function="gelu_new",
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    model = make_model(config, seed)
    tokens, targets = make_batches(config, B, T, seed)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    logits, loss, gradients = gradients_of(model, tokens[0], targets[0])
    print(f"{name}: {sum(p.numel() for p in weights.values())} parameters, loss {loss:.6f}")
    check_fp32_agrees(config, weights, tokens[0], targets[0], loss, gradients)
    rates, losses, norms = train(model, tokens, targets)
    print("  losses", " ".join(f"{x:.4f}" for x in losses))
    print("  norms ", " ".join(f"{x:.4f}" for x in norms))
    assert losses[0] == loss

    tensors = {name: p.to(torch.bfloat16) for name, p in weights.items()}
    tensors["layers_heads"] = torch.tensor([layers, heads], dtype=torch.int32)  # shapes tell the rest
    tensors["tokens"], tensors["targets"] = tokens, targets
    tensors["logits"] = logits.float()
    tensors["learning_rates"] = torch.tensor(rates, dtype=torch.float64)
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    tensors["gradient_norms"] = torch.tensor(norms, dtype=torch.float64)
    for parameter, p in model.named_parameters():
        if p.numel() <= largest_final:
            tensors["final." + parameter] = p.detach().float()
    grads = {"grad." + parameter: g.float() for parameter, g in gradients.items()}
    if split:
        write(FIXTURES / f"{name}_gradients.safetensors", grads)
    else:
        tensors |= grads
    write(FIXTURES / f"{name}.safetensors", tensors)


def write(path, tensors, metadata=None):
    save_file({name: t.contiguous() for name, t in tensors.items()}, path, metadata)
    path.chmod(0o644)
    print(f"  {path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    make_fixture("gpt_wide", 1, 4, 96, 50, 131, B=2, T=37, seed=1, largest_final=5000, split=True)
    make_fixture("gpt_long", 2, 2, 40, 140, 97, B=1, T=133, seed=2, largest_final=math.inf, split=False)
