"""Plans for machines that aren't here, as a user asks for them; llmc/run/roofline.c's arithmetic is test_roofline.c's business."""

import re
import shutil
import time
from pathlib import Path

import pytest
from trainer import CHANNELS, MODEL, SLOWNESS, T, VOCAB, dry_run, make_data, one_sentence, run, run_well

# 7.8B, like the 8B that Mishra et al. train on 15 trillion tokens.
LARGE = ["--layers", 36, "--heads", 32, "--channels", 4096, "--max-seq-len", 8192, "--vocab-size", 128000,
         "--batch-size", 1, "--total-batch-size", 3072 * 8192, "--max-tokens", "15T"]
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


def plan(device, world_size, *options):
    ranks = ["--world-size", world_size] if world_size else []
    return dry_run("--device", device, *ranks, *options)


def number(text, pattern):
    match = re.search(pattern, text, re.MULTILINE)
    assert match, text
    return float(match.group(1)) * (UNITS[match.group(2)] if match.lastindex == 2 else 1)


def seconds(text):
    return number(text, r"^  step +([\d.e+-]+) s")


@pytest.mark.parametrize("device, memory", [("h100", 80), ("h200", 141), ("b200", 180), ("gb200", 186)])
def test_8b_on_3072_cards(device, memory):
    start = time.monotonic()
    text = plan(device, 3072, "--link-bandwidth", 50, *LARGE)
    took = time.monotonic() - start
    print(f"{device}: {took:.2f} s, {seconds(text)} s a step")
    assert took < 5 * SLOWNESS
    total = number(text, r"^  total +([\d.]+) (\w?)B")
    assert number(text, r"total .* of ([\d.]+) GB free") == memory - 0.5
    assert ("it fits" in text) == (total <= memory * 1e9 - 512e6) and ("it doesn't fit" in text) != ("it fits" in text)
    assert f"a planned {device}: " in text and "each of 3072 ranks" in text
    # Tokens, speed and days say the same.
    days = number(text, r"^  time +15\.0T tokens: ([\d.]+) days")
    assert number(plan("b200", None, "--model", "gpt2-124M", "--max-steps", 1e15), r"^  time +[\d.]+[PE] tokens: ([\d.e+]+) days") > 1e6
    assert days == pytest.approx(15000e9 / (3072 * 8192) * seconds(text) / 86400, rel=0.01)
    for steps, unit, length in ((50_000, "minutes", 60), (2_000_000, "hours", 3600)):
        short = plan("b200", None, "--model", "gpt2-124M", "--max-steps", steps)
        assert number(short, rf"^  time +.* tokens: ([\d.]+) {unit}") == pytest.approx(steps * seconds(short) / length, rel=0.01)
    assert number(text, r"^  speed +([\d.]+)(\w?) tokens/s") == pytest.approx(3072 * 8192 / seconds(text), rel=0.01)
    overlapped = number(text, r"; ([\d.e+-]+) s where ranks exchange beside compute")
    assert number(text, r"^  compute +([\d.e+-]+) s") < overlapped < seconds(text)
    # A rank's gradients and weights, over the link.
    sent = number(text, r"a rank sends ([\d.]+) (\w?)B of gradients")
    assert number(text, r"gradients ([\d.e+-]+) s") == pytest.approx(sent / 50e9, rel=0.03)  # and latency


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_overlap_is_said_to_be_that_of_zero_1(stage):
    text = plan("h100", 8, "--link-bandwidth", 50, "--model", "gpt2-124M", "--zero", stage)
    assert ("s where ranks exchange beside compute, as on GPUs at --zero 1\n" in text) == (stage == 1)
    assert ("s if all were exchanged beside compute, as on GPUs at --zero 1 alone\n" in text) == (stage != 1)


def test_what_makes_a_plan_faster():
    base = ["--model", "gpt2-1558M", "--batch-size", 8]
    first = seconds(plan("h100", 64, "--link-bandwidth", 50, *base))
    assert seconds(plan("h100", 64, "--link-bandwidth", 100, *base)) < first
    assert seconds(plan("h200", 64, "--link-bandwidth", 50, *base)) < first
    assert seconds(plan("b200", 64, "--link-bandwidth", 50, *base)) < first
    assert seconds(plan("h100", 64, "--link-bandwidth", 50, "--weight-scaling", "2d", *base)) < first
    assert seconds(plan("h100", 64, "--link-bandwidth", 50, "--reduce", "bf16", *base)) < first
    assert seconds(plan("h100", 64, "--link-bandwidth", 50, "--gather", "fp32", *base)) > first
    assert seconds(plan("h100", 64, "--link-bandwidth", 50, "--total-batch-size", 2 * 64 * 8 * 1024, *base)) > 1.3 * first


def test_stages_take_less_memory():
    totals = [number(plan("b200", 8, "--zero", stage, "--model", "gpt2-1558M"), r"^  total +([\d.]+) (\w?)B")
              for stage in (0, 1, 2)]
    assert totals[0] > 1.3 * totals[1] > 1.3 * 1.1 * totals[2]


def test_one_card_needs_no_link():
    text = plan("b200", None, *MODEL)
    assert "\nrun      " in text and "on each of" not in text and "wire" not in text and seconds(text) > 0


def test_without_a_link_there_is_memory_and_wire_alone():
    text = plan("b200", 8, *MODEL)
    assert "it fits" in text and "wire     a rank sends" in text and "--link-bandwidth" in text and "  step " not in text


def test_this_machine():
    text = plan("cpu", 1, *MODEL)
    assert "plan     this machine: " in text and seconds(text) > 0


def test_the_time_is_of_all_recipes():
    """2 of 1000 steps have the first one, which step and table are of; the wire line says what each sends."""
    base = [*MODEL, "--vocab-size", 8192, "--batch-size", 16, "--max-steps", 1000]
    first, second = (seconds(plan("h100", None, *base, "--recipe", recipe)) for recipe in ("mxfp8", "bf16"))
    text = plan("h100", None, *base, "--recipe", "mxfp8", "--recipe-at", "2:bf16")
    assert seconds(text) == first and "(this and the table are of step 0's recipe, the time of all recipes)" in text
    minutes = number(text, r"^  time +.* tokens: ([\d.e+-]+) minutes")
    assert minutes == pytest.approx((2 * first + 998 * second) / 60, rel=0.01) and abs(first / second - 1) > 0.03
    assert "'s recipe" not in plan("h100", None, *base)
    wire = plan("h100", 4, *base, "--recipe", "mxfp8", "--recipe-at", "2:bf16")
    lines = [re.search(rf"^{start}a rank sends .*", wire, re.M).group() for start in ("wire     ", "         from step 2 on ")]
    assert "(mx;" in lines[0] and lines[0][9:] != lines[1][24:]


def test_the_time_is_of_the_steps_that_are_left(tmp_path):
    """Of a run of 16 steps that goes on after 4."""
    data = make_data(tmp_path)
    size = ["--vocab-size", VOCAB, *MODEL, "--batch-size", 2, "--out-dir", tmp_path / "run"]
    run_well(*data, *size, "--max-steps", 4)
    text = plan("cpu", 1, "--resume", "--max-steps", 16, "--out-dir", tmp_path / "run")
    assert number(text, r"^  time +([\d.]+)(\w?) tokens") == 12 * 2 * T and ", 16 steps, " in text


BESIDE = r"^  to save and load, besides +([\d.]+) (\w?)B"


def test_what_loading_and_saving_takes():
    """The largest matrix twice, in FP32: of the FFN, 4 channels by channels, or the embedding. One decimal is printed."""
    assert number(plan("cpu", None, *MODEL), BESIDE) == pytest.approx(2 * 4 * 4 * CHANNELS**2, abs=50)
    assert number(plan("cpu", None, *MODEL, "--vocab-size", 1000), BESIDE) == pytest.approx(2 * 4 * 1000 * CHANNELS, abs=50)


def test_even_shards_over_mpi_send_what_a_ring_does():
    wire = [re.search(r"^wire.*", plan(device, 2, *MODEL, "--vocab-size", 64, "--max-seq-len", 64), re.M).group() for device in ("cpu", "b200")]
    assert wire[0] == wire[1]


NATIVE_BLOCKS = ["--dry-run", "--recipe", "fp8-blockwise-fp32", "--mx-gemm", "native"]
REFUSED = {
    "a card to train on": (["--device", "h100", "--train-data", "x"], ["--device h100", "--dry-run"]),
    "a link to train with": (["--link-bandwidth", 3, "--train-data", "x"], ["--link-bandwidth", "--dry-run"]),
    "an unknown card": (["--dry-run", "--device", "h10"], ["h10", "h100"]),
    "a recipe for comparisons": (["--dry-run", "--device", "h100", "--recipe", "fp32"], ["--recipe fp32"]),
    "a batch that isn't whole": (["--dry-run", "--device", "h100", "--world-size", 3, "--total-batch-size", 1000],
                                 ["--total-batch-size 1000", "3 ranks", "take 12288"]),
    "blocks of 128 natively on a card without them": ([*NATIVE_BLOCKS, "--device", "b200"],
                                                      ["--mx-gemm native", "h.0.qkv's fprop", "9.0", "--mx-gemm auto"]),
    "blocks of 128 natively of an odd shape": ([*NATIVE_BLOCKS, "--device", "h100", "--layers", 2, "--heads", 3, "--channels", 120],
                                               ["h.0.qkv's fprop", "K isn't a multiple of 16", "--mx-gemm auto"]),
    "blocks of 128 natively of odd micro-batches": ([*NATIVE_BLOCKS, "--device", "h100", "--seq-len", 1000, "--batch-size", 1],
                                                    ["h.0.qkv's fprop", "M or N isn't a multiple of 16"]),
    "MXFP8 natively on Hopper": (["--dry-run", "--device", "h100", "--mx-gemm", "native", "--recipe-at", "5:mxfp8", "--recipe", "fp8-blockwise"],
                                 ["--mx-gemm native", "h.0.qkv's fprop", "below 10.0", "--mx-gemm auto"]),
    "too many tokens in the vocabulary": (["--dry-run", "--device", "h100", "--vocab-size", 1 << 25], ["--vocab-size"]),
    "too many ranks": (["--dry-run", "--device", "h100", "--world-size", 65537], ["--world-size", "65536"]),
    "a link between no ranks": (["--dry-run", "--link-bandwidth", 50], ["--link-bandwidth changes nothing without --world-size"]),
    "a negative link": (["--dry-run", "--device", "h100", "--link-bandwidth", -1], ["--link-bandwidth"]),
    "a link that is no number": (["--dry-run", "--device", "h100", "--link-bandwidth", "nan"], ["--link-bandwidth", "nan"]),
    "an endless link": (["--dry-run", "--device", "h100", "--link-bandwidth", "1e300"], ["--link-bandwidth", "100000"]),
}


@pytest.mark.parametrize("arguments, parts", REFUSED.values(), ids=[name.replace(" ", "-") for name in REFUSED])
def test_refused(arguments, parts):
    done = run(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    sentence = one_sentence(done.stderr)
    assert all(part in sentence for part in parts), sentence


# Whether a card does without emulation under --mx-gemm native, by its recipe; FP8 is faster than BF16 there.
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-blockwise", "fp8-blockwise-fp32"])
def test_fp8_is_native_on_hopper(recipe):
    base = ["--model", "gpt2-1558M", "--batch-size", 8]
    native = plan("h100", None, *base, "--recipe", recipe, "--mx-gemm", "native")
    assert seconds(native) == seconds(plan("h100", None, *base, "--recipe", recipe))
    assert seconds(native) < seconds(plan("h100", None, *base, "--recipe", "bf16"))
    assert seconds(plan("h100", None, *base, "--recipe", recipe, "--mx-gemm", "emulated")) > seconds(native)


def test_sums_by_block_take_longer():
    """A card without blocks of 128 decodes those of powers of two; with FP32 scales it sums by block."""
    decoded, summed = (plan("b200", None, "--model", "gpt2-1558M", "--batch-size", 8, "--recipe", recipe)
                       for recipe in ("fp8-blockwise", "fp8-blockwise-fp32"))
    assert seconds(summed) > seconds(decoded)


def test_a_batch_that_fits_is_named():
    options = ["--dry-run", "--device", "h100", "--model", "gpt2-1558M", "--max-steps", 1]
    done = run(*options, "--batch-size", 3072)
    batch, total = map(int, re.search(r"--batch-size (\d+) would fit \(--total-batch-size (\d+) keeps", one_sentence(done.stderr)).groups())
    assert done.returncode == 2 and total == 3072 * 1024
    run_well(*options, "--batch-size", batch, "--total-batch-size", total)
    larger = next(b for b in range(batch + 1, 3073) if 3072 % b == 0)
    assert "it doesn't fit" in run(*options, "--batch-size", larger, "--total-batch-size", total).stderr


@pytest.mark.parametrize("batch", [2, 1000])
def test_zero_2_is_named_where_it_fits(batch):
    """A Llama of 7B on eight H100s, whose gradients are a third of their memory."""
    options = ["--dry-run", "--device", "h100", "--layers", 32, "--heads", 32, "--channels", 4096, "--ffn", 11008,
               "--activation", "swiglu", "--vocab-size", 32000, "--max-seq-len", 4096, "--untied-head", "--recipe", "bf16",
               "--batch-size", batch]
    done = run(*options, "--world-size", 8)
    assert done.returncode == 2 and ("--zero 2 would fit; or " in one_sentence(done.stderr)) == (batch == 2)
    at_2 = run(*options, "--world-size", 8, "--zero", 2)
    assert at_2.returncode == (0 if batch == 2 else 2) and "--zero 2" not in at_2.stderr
    assert "--zero 2" not in one_sentence(run(*options, "--world-size", 1).stderr)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_largest_of_everything_is_planned_without_overflow(stage):
    text = plan("h100", 65536, "--link-bandwidth", 1e-3, "--layers", 1000, "--heads", 65536, "--channels", 65536,
                "--vocab-size", 1 << 24, "--max-seq-len", 1 << 20, "--batch-size", 1 << 20, "--zero", stage,
                "--max-tokens", "9e14")
    assert "it doesn't fit" in text and not re.search(r"\b(nan|inf)\b|-\d", text.replace("e-", ""))
    assert number(text, r"^  total +([\d.]+) (\w?)B") > 0


# ---------------------------------------------------------------------------------------------------------------------
# A run that would be refused is refused before it is planned.


@pytest.mark.parametrize("arguments, parts", [
    (["--train-data", "nowhere/*.bin"], ["no file matches 'nowhere/*.bin'"]),
    (["--total-batch-size", 100], ["--total-batch-size 100 isn't a multiple of the micro-batch's 128 tokens", "take 128"]),
    ([*NATIVE_BLOCKS, "--device", "h100", "--seq-len", 24, "--sample-every", 5],
     ["h.0.qkv's fprop", "M or N isn't a multiple of 16"]),
    ([*NATIVE_BLOCKS, "--device", "h100", "--quantize-lm-head", "--sample-every", 5],
     ["lm_head's fprop", "M or N isn't a multiple of 16"]),
    ([*NATIVE_BLOCKS, "--device", "h100", "--quantize-lm-head", "--eval-requests", "requests.jsonl"],
     ["lm_head's fprop", "M or N isn't a multiple of 16"]),
    ([*NATIVE_BLOCKS, "--device", "h100", "--seq-len", 24],  # the last micro-batch of validation
     ["h.0.qkv's fprop", "M or N isn't a multiple of 16"]),
    (["--max-steps", 10**15, "--total-batch-size", "128T"], ["--max-steps", "--total-batch-size", "lower"]),
    (["--max-steps", 10**15, "--batch-size", 2**20], ["--max-steps", "--batch-size", "lower"]),
    (["--max-steps", 10**14, "--total-batch-size", "128K", "--train-data", "{train}:0.5,{val}:0.5@0%,{val}:1@50%"],
     ["--max-steps", "--total-batch-size"]),
    (["--val-data", "nowhere/*.bin"], ["no file matches 'nowhere/*.bin'"])])
def test_a_dry_run_checks_the_run(data, arguments, parts):
    done = run("--dry-run", *data, *MODEL, *[str(word).format(train=data[1], val=data[3]) for word in arguments])
    assert done.returncode == 2
    assert all(part in one_sentence(done.stderr) for part in parts), done.stderr


def test_only_recipes_to_come_are_checked(data, tmp_path):
    """A card needn't have what a run is past; nor need memory hold what a switch to come keeps besides."""
    out, later = tmp_path / "run", ["--recipe-at", "2:mxfp8"]
    run_well(*data, *MODEL, "--recipe", "fp8-blockwise-fp32", *later, "--max-steps", 3, "--threads", 1, "--out-dir", out)
    run_well("--resume", "--out-dir", out, "--max-steps", 4, "--dry-run", "--device", "b200", "--mx-gemm", "native")
    past = run_well("--resume", "--out-dir", out, "--max-steps", 4, "--dry-run", "--device", "cpu").stdout
    besides = [number(text, BESIDE) for text in (past, plan("cpu", None, *MODEL), plan("cpu", None, *MODEL, *later))]
    assert besides[0] == besides[1] < besides[2]
    early = run(*NATIVE_BLOCKS, *data, *MODEL, *later, "--max-steps", 4, "--device", "b200")
    assert early.returncode == 2 and "only compute capability 9.0" in one_sentence(early.stderr)


def test_a_dry_run_shows_data_and_steps(data):
    text = run_well("--dry-run", *data, *MODEL, "--max-steps", 10, "--threads", 1).stdout
    assert "data     20.0k tokens to train on in 2 files, 625 windows of 32; 3.0k to validate on\n" in text
    assert "run      128 tokens a step (4 sequences of 32, 1 micro-batch), 10 steps, 0.064 epochs\n" in text
    assert "  it fits: " in text


def test_a_dry_run_says_that_the_vocabulary_is_the_presets(data, tmp_path):
    sentence = "without a tokenizer.bin the vocabulary is the preset's"
    shard = shutil.copy(Path(data[1]).parent / "train_000000.bin", tmp_path)
    for where, options, is_said in [(data[1], [], False), (shard, [], True), (shard, ["--vocab-size", VOCAB], False)]:
        text = run_well("--dry-run", "--train-data", where, "--layers", 1, *options).stdout
        assert (sentence in text) == is_said


@pytest.mark.parametrize("options, steps", [(["--epochs", 3], 468), (["--epochs", 0.5], 78), ([], 156), (["--epochs", 3, "--max-steps", 9], 9)])
def test_epochs(data, options, steps):
    text = run_well("--dry-run", *data, *MODEL, *options).stdout
    assert f"1 micro-batch), {steps} steps, " in text
