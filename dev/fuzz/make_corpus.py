"""Writes the seeds in dev/fuzz/corpus: a few small files of each kind, valid and nearly so. usage: make_corpus.py"""

import json
import struct
from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "corpus"


def save(target, name, data):
    directory = CORPUS / target
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def token_file(magic, version, tokens, code, claimed=None):
    header = [magic, version, len(tokens) if claimed is None else claimed] + [0] * 253
    return struct.pack("<256I", *header) + struct.pack(f"<{len(tokens)}{code}", *tokens)


def tokens():
    save("tokens", "uint16", token_file(20240520, 1, [i * i % 251 for i in range(100)], "H"))
    save("tokens", "uint32", token_file(20240801, 7, [i * 7 % 65536 for i in range(100)], "I"))
    save("tokens", "empty", token_file(20240520, 1, [], "H"))
    save("tokens", "claims-4G", token_file(20240801, 7, [1, 2, 3], "I", 2**32 - 1))


def tensors(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors():
    def entry(dtype, shape, begin, end):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    save("safetensors", "two", tensors({"__metadata__": {"format": "pt"}, "a.weight": entry("F32", [2, 3], 0, 24),
                                        "a.bias": entry("BF16", [3], 24, 30)}, bytes(range(30))))
    save("safetensors", "types", tensors({"h": entry("F16", [2], 0, 4), "d": entry("F64", [1], 4, 12),
                                          "s": entry("F32", [], 12, 16), "n": entry("I64", [0, 4], 16, 16),
                                          "q": entry("F4", [2], 16, 17)}, b"\0\x7c\x01\x80" + bytes(13)))
    save("safetensors", "none", tensors({}, b""))
    save("safetensors", "huge-shape", tensors({"x": entry("F32", [2**32, 2**32], 0, 4)}, bytes(4)))
    save("safetensors", "huge-header", struct.pack("<Q", 2**63) + b"{}")


def config():
    model = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 257, "n_positions": 128,
             "n_embd": 256, "n_layer": 4, "n_head": 4, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
             "tie_word_embeddings": True}
    save("config", "demo", json.dumps(model))
    save("config", "variant", json.dumps(dict(model, n_inner=None, scale_attn_weights=True, add_cross_attention=False,
                                              scale_attn_by_inverse_layer_idx=False), indent=1))
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257, "hidden_size": 96,
             "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
             "max_position_embeddings": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False,
             "mlp_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "tie_word_embeddings": False}
    save("config", "llama", json.dumps(llama))
    save("config", "olmo", json.dumps(dict(llama, model_type="olmo", clip_qkv=None, rope_scaling=None, rope_theta=1e4)))
    save("config", "ours", json.dumps(dict(llama, model_type="train_gpt_mxfp8", activation="relu2", norm="layernorm", norm_eps=1e-5,
                                           norm_affine=True, qk_norm=True, biases=False, positions="rope", rope_theta=5e5)))
    save("config", "huge", json.dumps(dict(model, vocab_size=2**52, n_embd=2**40, n_layer=2**30)))


def state():
    window = {"count": 2, "position": 2, "values": [5.5, 5.25]}
    values = {"version": 1, "step": 3, "next_sample": 24, "train_tokens": 1000, "seq_len": 32, "seed": 1337,
              "log_position": 512, "skipped": 0, "nonfinite_in_a_row": 0, "evaluated": -1, "best_val_loss": None,
              "seconds": 1.5, "losses": window, "grad_norms": {"count": 0, "position": 0, "values": []}}
    options = {"layers": ["4"], "learning-rate": ["0.001"], "schedule": ["cosine"], "operand": ["wgrad-x=bf16"],
               "resume": ["false"], "prompt": ["ROMEO"], "train-data": ["data/*.bin"], "format-weights": []}
    save("state", "options", json.dumps(dict(values, options=options)))
    save("state", "plain", json.dumps(values, indent=1))


def tokenizer():
    def file(version, texts, end_of_text):
        header = [20240328, version, len(texts), end_of_text] + [0] * 252
        return struct.pack("<256I", *header) + b"".join(bytes([len(text)]) + text for text in texts)

    letters = [bytes([c]) for c in b" abcdefgh\n"]
    save("tokenizer", "letters", file(2, letters + [b"<|endoftext|>"], 10))
    save("tokenizer", "merges", file(2, letters + [b"ab", b"abc", b"abcab", "é".encode(), b"ab", b"<|e|>"], 15))
    save("tokenizer", "version-1", file(1, letters, 0))
    save("tokenizer", "claims-4G", struct.pack("<256I", 20240328, 2, 2**32 - 1, 0, *[0] * 252) + b"\1a")


def npy():
    def file(version, descr, shape, data, order="False"):
        header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
        length = struct.pack("<H" if version == 1 else "<I", len(header))
        return b"\x93NUMPY" + bytes([version, 0]) + length + header + data

    floats = struct.pack("<64f", *[(i - 31) * 1.37**(i % 40) for i in range(64)])
    save("npy", "f4", file(1, "'<f4'", "(2, 32)", floats))
    save("npy", "f8", file(2, "'<f8'", "(3,)", struct.pack("<3d", 1.5, -1e300, float("nan"))))
    save("npy", "f2", file(1, "'<f2'", "(2, 2, 2)", bytes(range(100, 116))))
    save("npy", "bf16", file(3, "'<V2'", "()", b"\x80\x3f"))
    save("npy", "huge-shape", file(1, "'<f4'", "(4294967296, 4294967296)", floats))
    save("npy", "fortran", file(1, "'<f4'", "(2, 2)", floats[:16], "True"))
    save("npy", "raw", floats)


def options():
    save("options", "train", "--train-data\ndata/*.bin\n--layers\n4\n--learning-rate=1e-3\n--schedule\nwsd\n--no-resume")
    save("options", "recipe", "--recipe\nmxfp8\n--operand\nwgrad-x=bf16\n--operand=dgrad-dy=e5m2\n--format-weights\ne4m3")
    save("options", "numbers", "--max-tokens\n1.5M\n--max-steps\n2e3\n--seed\n123456789012345\n--beta2\n.95")
    save("options", "mistakes", "--layres\n4")
    save("options", "quotes", "--prompt\n'a'\\\"\x7f\xff".encode("latin-1"))


def requests():
    vocabulary = {chr(code): code for code in range(97, 123)} | {"th": 256, "he": 257, "the": 258}
    gpt2 = {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": vocabulary, "merges": ["t h", "th e", "h e"]}}
    mark = "\u2581"
    llama = gpt2 | {"pre_tokenizer": None, "added_tokens": [{"id": 263, "content": "<|end|>", "special": True}],
                    "normalizer": {"type": "Sequence", "normalizers": [
                        {"type": "Prepend", "prepend": mark}, {"type": "Replace", "pattern": {"String": " "}, "content": mark}]}}
    scored = '{"id": 1, "context": "the", "continuation": " he"}\n{"id": 2, "context": "", "continuation": "th"}\n'
    asked = "".join(f'{{"id": {i}, "context": "the", "continuation": " {text}", "task": "t", "question": 0, "gold": {gold}}}\n'
                    for i, text, gold in ((0, "he", "true"), (1, "th", "false")))
    for name, rules, lines in (("gpt2", gpt2, scored), ("llama", llama, asked), ("no-rules", {}, asked)):
        save("requests", name, json.dumps(rules, ensure_ascii=False) + "\0" + lines)


def main():
    for write in (tokens, safetensors, config, state, tokenizer, npy, options, requests):
        write()


if __name__ == "__main__":
    main()
