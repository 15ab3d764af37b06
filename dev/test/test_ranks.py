"""The program on 1, 2 and 4 ranks under mpirun: the same losses, the same bits for the same number, checkpoints that don't
depend on it; ranks that are killed, hang, differ or meet a value that isn't finite."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from perturb import deviations, make_initial_weights
from trainer import (
    END_OF_TEXT, ENVIRONMENT, INT, KILL, ROOT, SLOWNESS, TERM, TRAINER, VOCAB, assert_same_run, check_loadable, events,
    latest, losses, make_data, markov_tokens, one_sentence, run, run_well, steps, validations, weights_and_moments,
    words, write_tokenizer, write_tokens)

T, B, MICRO_BATCHES, STEPS = 64, 2, 4, 8
# Weights of 65 to 512 rows: over 4 ranks some have fewer than others, some none.
MODEL = ["--vocab-size", VOCAB, "--layers", 2, "--heads", 4, "--channels", 128, "--max-seq-len", T, "--batch-size", B]
BATCH = ["--total-batch-size", MICRO_BATCHES * B * T]
LENGTH = ["--max-steps", STEPS, "--val-every", 4, "--val-steps", 5, "--checkpoint-every", 4, "--keep-checkpoints", 0]
ENDLESS = ["--max-steps", 100000, "--checkpoint-every", 3]
# Envelopes as in test_golden.py. A rank that gives up must end long before mpirun's own patience does.
SEEDS, WINDOW, ENVELOPES = range(3), 3, 4
END_SECONDS = 20 * SLOWNESS

# Open MPI's leaks aren't ours. On one machine ranks meet in memory, for which ob1 is enough: Open MPI 5 says a line where TCP
# would have no way, and libfabric, which nothing here uses, takes more than a second to begin and to end.
MPI_ENVIRONMENT = ENVIRONMENT | {"OMP_NUM_THREADS": "1", "OMPI_MCA_orte_abort_print_stack": "0", "OMPI_MCA_pml": "ob1",
                                 "OMPI_MCA_btl": "^tcp,ofi",
                                 "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"}
MPIRUN = ["mpirun", "--oversubscribe", "--allow-run-as-root", "--tag-output", "-np"]
# Open MPI 5 puts a space after it. (A line that begins with one loses it under Open MPI 4.)
TAG = re.compile(r"^\[\d+,(\d+)\]<(stdout|stderr)>: ?", re.M)

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")


class Done:
    """What ranks printed, without mpirun's tags. Lines in brackets are Open MPI's own, and hwloc's, of which there are some where a
    machine lacks /sys or a process is gone."""

    def __init__(self, code, out, errors):
        self.returncode, self.stdout = code, TAG.sub("", out)
        lines = [line for line in errors.splitlines() if TAG.match(line)]
        said = [(int(TAG.match(line)[1]), TAG.sub("", line)) for line in lines]
        self.sentences = [(rank, text) for rank, text in said if not text.startswith("[")]
        self.noise = [line for line in errors.splitlines() if not line.startswith("[")]

    def __str__(self):
        return f"exit code {self.returncode}\n{self.stdout[-2000:]}\n{self.sentences}\n" + "\n".join(self.noise)

    def only_sentence(self):
        """The one that was said, by however many ranks."""
        sentence, = {text for _, text in self.sentences}
        return one_sentence(sentence + "\n")


def start_ranks(ranks, *arguments, program=TRAINER, environment=None, mpirun=MPIRUN):
    return subprocess.Popen([*mpirun, str(ranks), program, *words(arguments)[1:]], cwd=ROOT, env=MPI_ENVIRONMENT | (environment or {}),
                            text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def finish(process, seconds=120):
    try:
        out, errors = process.communicate(timeout=seconds * SLOWNESS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        pytest.fail(f"not ended after {seconds} s: {Done(None, out, errors)}")
    return Done(process.returncode, out, errors)


def run_ranks(ranks, *arguments, **options):
    return finish(start_ranks(ranks, *arguments, **options))


def run_failing_ranks(ranks, *arguments, program=TRAINER):
    """Ranks that all end by themselves, with the same exit code. mpirun doesn't learn it, nor asks for MPI_Finalize: it would
    take two seconds to end ranks that have ended."""
    done = run_ranks(ranks, "-c", '"$0" "$@"; echo "exit code $?"', program, *arguments, program="sh",
                     environment={"OMPI_MCA_orte_allowed_exit_without_sync": "1"})
    codes = re.findall(r"^exit code (\d+)$", done.stdout, re.M)
    assert len(codes) == ranks and len(set(codes)) == 1 and done.returncode == 0, done
    done.returncode = int(codes[0])
    done.stdout = re.sub(r"^exit code \d+\n", "", done.stdout, flags=re.M)
    return done


def run_ranks_well(ranks, *arguments, **options):
    """On one rank without mpirun."""
    if ranks == 1:
        return run_well(*arguments, environment={"OMP_NUM_THREADS": "1"})
    done = run_ranks(ranks, *arguments, **options)
    assert done.returncode == 0 and done.sentences == [] and done.noise == [], done
    return done


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    options = make_data(tmp_path_factory.mktemp("data"))
    tried = run_ranks(2, *options, *MODEL, "--max-steps", 1, "--batch-size", 1, "--out-dir",
                      tmp_path_factory.mktemp("tried") / "run")
    if tried.returncode != 0 and any("without" in text and "MPI" in text for _, text in tried.sentences):
        pytest.skip("built without MPI")
    return options


@pytest.fixture(scope="session")
def trained(data, tmp_path_factory):
    """trained(ranks, options...): the directory of a run, made once."""
    made = {}

    def train(ranks, *options):
        if (ranks, options) not in made:
            out = tmp_path_factory.mktemp("trained") / "run"
            done = run_ranks_well(ranks, *data, *MODEL, *BATCH, *LENGTH, *options, "--out-dir", out)
            made[ranks, options] = out, done.stdout
        return made[ranks, options][0]

    train.stdout = lambda *key: made[key[0], key[1:]][1]
    return train


# ---------------------------------------------------------------------------------------------------------------------
# The same losses

@pytest.fixture(scope="session")
def bounds(data, trained, tmp_path_factory):
    """How far another order of the gradients' sums may move each step's loss. They are sums of MICRO_BATCHES addends:
    measured as perturb.py does, with weights that are off by that sum's roundings. The first loss has seen no gradient: a
    sum of as many doubles."""
    scratch = tmp_path_factory.mktemp("perturbed")
    reference = losses(trained(1))
    common = [*data, *BATCH, "--batch-size", B, "--threads", 1]
    initial = make_initial_weights(scratch / "initial", *data, *MODEL, "--threads", 1)
    found = np.abs(deviations(initial, reference, MICRO_BATCHES, SEEDS, scratch, *common, "--max-steps", STEPS)).max(axis=0)
    envelope = [found[max(0, step - WINDOW):step + WINDOW + 1].max() for step in range(STEPS)]
    return np.array([2 * MICRO_BATCHES * 2.0**-53 * reference[0]] + [ENVELOPES * e for e in envelope[1:]])


def assert_near(out, reference, bounds, what, first=0):
    found = losses(out)[first:]
    difference = np.abs(found - losses(reference)[first:])
    ratio = difference / bounds[first:]
    worst = int(ratio.argmax())
    same = int(np.argmax(np.append(difference, 1) > 0))
    print(f"{what}: the first {same} steps have the same bits; worst at step {first + worst}: difference "
          f"{difference[worst]:.1e}, bound {bounds[first + worst]:.1e}, margin {1 / max(ratio[worst], 1e-300):.3g}")
    assert ratio.max() <= 1


def test_a_plan_that_does_not_fit_is_said_once(data):
    done = run_failing_ranks(2, "--dry-run", "--device", "cpu", "--model", "nemotron-8B", "--batch-size", 64)
    assert done.returncode == 2 and [text for _, text in done.sentences if "it doesn't fit, " in text] and len(done.sentences) == 1


def test_ranks_of_a_machine_share_its_memory(data):
    """Two have half of what one has, and of that other programs may take or leave some meanwhile."""
    texts = [run_ranks_well(ranks, "--dry-run", "--device", "cpu", *MODEL).stdout for ranks in (1, 2)]
    found = [re.search(r"of ([\d.]+) (\w)B free", text) for text in texts]
    one, two = (float(match[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]] for match in found)
    assert 0.3 * one < two < 0.7 * one


QUANTIZED_HEAD = ["--recipe", "fp32", "--operand-in", "lm_head:*=e4m3"]


@pytest.mark.parametrize("gather", ["mx", "fp32"])
def test_an_embedding_in_fp32_whose_head_is_quantized(trained, bounds, gather):
    """The two are one weight: its copies for the head could be sent, its rows in FP32 are every rank's. More of this run is
    in FP32 than of that whose bounds these are."""
    assert_near(trained(2, *QUANTIZED_HEAD, "--gather", gather), trained(1, *QUANTIZED_HEAD), bounds, f"--gather {gather}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_are_those_of_one_rank(trained, bounds, ranks):
    assert_near(trained(ranks), trained(1), bounds, f"{ranks} ranks against 1")
    assert [step for step, _ in validations(trained(ranks))] == [step for step, _ in validations(trained(1))]
    # A validation's sum over windows, in doubles, of weights that differ as the losses do.
    for (step, loss), (_, expected) in zip(validations(trained(ranks)), validations(trained(1))):
        assert abs(loss - expected) <= bounds[min(step, STEPS - 1)]


def test_bounds_tell_another_run(data, trained, bounds, tmp_path):
    """What any run met would show nothing."""
    run_well(*data, *MODEL, *BATCH, "--max-steps", STEPS, "--val-every", 0, "--recipe", "bf16", "--threads", 1, "--out-dir",
             tmp_path / "run")
    assert (np.abs(losses(tmp_path / "run") - losses(trained(1))) > bounds).any()


def test_the_same_bits_every_time(data, trained, tmp_path):
    run_ranks_well(4, *data, *MODEL, *BATCH, *LENGTH, "--out-dir", tmp_path / "again")
    assert_same_run(tmp_path / "again", trained(4))


def test_documents_are_masked_on_all_ranks(trained, bounds, tmp_path):
    options = make_data(tmp_path / "data")
    for shard in range(2):
        tokens = markov_tokens(9000, shard)
        tokens[::11] = END_OF_TEXT
        write_tokens(tmp_path / "data" / f"train_{shard:06}.bin", tokens)
    for name, ranks, masked in (("one", 1, ["--mask-documents"]), ("two", 2, ["--mask-documents"]), ("unmasked", 2, [])):
        run_ranks_well(ranks, *options, *MODEL, *BATCH, *LENGTH, *masked, "--out-dir", tmp_path / name)
    assert_near(tmp_path / "two", tmp_path / "one", bounds, "2 ranks with documents masked against 1")
    assert (np.abs(losses(tmp_path / "unmasked") - losses(tmp_path / "one")) > bounds).all()


def memory_lines(text):
    found = re.findall(r"^ {1,2}(\S.*?)  +([\d.]+) (\w?B)", text, re.M)
    return {name: float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit] for name, number, unit in found}


def test_zero_stages(trained, bounds):
    for stage in (0, 2):
        assert_near(trained(2, "--zero", stage), trained(1), bounds, f"--zero {stage}")
    trained(2)
    memory = [memory_lines(trained.stdout(2, *options)) for options in (("--zero", 0), (), ("--zero", 2))]
    for name in ("master weights (fp32)", "moments (fp32)"):
        assert memory[1][name] < 0.6 * memory[0][name] and memory[2][name] == memory[1][name]


def test_muon_at_every_stage(trained):
    """test_param.c has the bits, of equal gradients. Here their sums have another order at each stage, which Newton-Schulz
    makes more of than AdamW does: it raises small singular values, and what rounding has made of them."""
    runs = [losses(trained(2, "--optimizer", "muon", "--zero", stage)) for stage in (0, 1, 2)]
    print([run[-1] for run in runs])
    assert all(abs(run[0] - runs[0][0]) < 1e-6 and abs(run[-1] - runs[0][-1]) < 0.01 for run in runs)
    assert runs[0][-1] < runs[0][0] - 0.5


def test_muon_resumes(trained, tmp_path):
    straight = trained(2, "--optimizer", "muon", "--zero", 1)
    out = halfway(straight, tmp_path / "run")
    run_ranks_well(2, "--resume", "--out-dir", out)
    assert_same_run(out, straight)


def test_zero_stages_in_a_plan():
    """Stage 2 has one layer's gradients whole, of all others this rank's sums: what is planned for 4 ranks, by one."""
    memory = [memory_lines(run_well(*MODEL, "--layers", 8, "--dry-run", "--world-size", 4, "--zero", stage).stdout)
              for stage in (0, 1, 2)]
    gradients = [kinds["gradients of weights (fp32)"] for kinds in memory]
    assert gradients[0] == gradients[1] and 0.25 < gradients[2] / gradients[1] < 0.45
    moments = [kinds["moments (fp32)"] for kinds in memory]
    assert moments[1] == moments[2] and 0.25 <= moments[1] / moments[0] < 0.3


def test_ways_to_gather(trained, bounds):
    """MX and FP32 give the same copies; by way of BF16 they are rounded twice."""
    other = trained(2, "--gather", "fp32")
    assert (losses(other) == losses(trained(2))).all() and validations(other) == validations(trained(2))
    assert weights_and_moments(latest(other)) == weights_and_moments(latest(trained(2)))
    other = losses(trained(2, "--gather", "bf16"))
    print(f"--gather bf16: losses off by up to {np.abs(other - losses(trained(2))).max():.1e}")
    assert other[0] == losses(trained(2))[0] or abs(other[0] - losses(trained(2))[0]) < 0.01
    assert other[-1] < other[0] - 0.5 and (other != losses(trained(2))).any()


SCALED = ["fp8-current", "fp8-delayed", "fp8-blockwise", "fp8-blockwise-fp32", "nvfp4", "nvfp4-nvidia", "nvfp4-46",
          "mxfp8-nvfp4", "nvfp4-mxfp8", "mxfp4-sr"]


@pytest.mark.parametrize("recipe", SCALED)
def test_scalings_beside_mx(trained, recipe):
    """Copies that are sent are those that every rank makes of weights gathered in FP32, and those of one rank: the first
    loss has the same addends. Micro-batches that three ranks can share, whose rows of a weight differ in number."""
    options = ("--recipe", recipe, "--total-batch-size", 3 * B * T, "--max-steps", 4)
    zero = ("--zero", 1 + SCALED.index(recipe) % 2)
    sent, gathered = (trained(3, *options, *zero, *more) for more in ((), ("--gather", "fp32")))
    assert list(losses(sent)) == list(losses(gathered)) and validations(sent) == validations(gathered)
    assert weights_and_moments(latest(sent)) == weights_and_moments(latest(gathered))
    one = trained(1, *options)
    difference = np.abs(losses(sent) / losses(one) - 1)
    print(f"{recipe}: losses of 3 ranks are off by up to {difference.max():.1e} of one rank's, the first by {difference[0]:.1e}")
    assert difference[0] <= 4 * 2.0**-53


def test_blocks_of_128_on_four_ranks(trained):
    """They leave two ranks and more nothing of a matrix of 128 or 256 rows."""
    sent, gathered, whole = (trained(4, "--recipe", "fp8-blockwise", *more) for more in
                             ((), ("--gather", "fp32"), ("--zero", 0)))
    difference = np.abs(losses(sent) / losses(whole) - 1)
    print(f"losses are off by up to {difference.max():.1e} of those without sharding")
    assert difference[0] == 0 and losses(sent)[-1] < losses(sent)[0] - 0.5
    assert list(losses(sent)) == list(losses(gathered))
    assert weights_and_moments(latest(sent)) == weights_and_moments(latest(gathered))


def test_a_switch_between_blocks_of_other_heights(data, tmp_path):
    """Ranks shard by the largest blocks of the run's recipes from its beginning on."""
    for name, options in (("sent", []), ("gathered", ["--gather", "fp32"])):
        run_ranks_well(2, *data, *MODEL, *BATCH, *LENGTH, "--schedule", "constant", "--recipe-at", "3:fp8-blockwise",
                       "--recipe-at", "5:nvfp4", *options, "--out-dir", tmp_path / name)
    assert list(losses(tmp_path / "sent")) == list(losses(tmp_path / "gathered"))
    assert weights_and_moments(latest(tmp_path / "sent")) == weights_and_moments(latest(tmp_path / "gathered"))


HADAMARD = ("--hadamard-fprop", "random", "--hadamard-dgrad", "random", "--hadamard-wgrad", "fixed")


@pytest.mark.parametrize("options", [(32, *HADAMARD), (64, "--backward-source", "forward", "--hadamard-dgrad", "random")],
                         ids=["transforms", "forward"])
def test_transforms(trained, options):
    """An owner's copies of its rows, sent, are those that all make of gathered FP32; and of one rank."""
    options = ("--recipe", "mxfp4", "--hadamard-size", *options)
    sent, gathered, whole = (trained(2, *options, *more) for more in ((), ("--gather", "fp32"), ("--zero", 0)))
    assert list(losses(sent)) == list(losses(gathered)) and losses(sent)[0] == losses(whole)[0]
    assert weights_and_moments(latest(sent)) == weights_and_moments(latest(gathered))
    assert losses(sent)[-1] < losses(sent)[0] - 0.3
    assert (losses(sent)[1:] != losses(trained(2, "--recipe", "mxfp4"))[1:]).all()


def test_gradients_in_bf16(trained):
    other = losses(trained(2, "--reduce", "bf16"))
    print(f"--reduce bf16: losses off by up to {np.abs(other - losses(trained(2))).max():.1e}")
    assert other[0] == losses(trained(2))[0] and other[-1] < other[0] - 0.5 and (other != losses(trained(2))).any()


def test_square_weights(trained):
    """2-D scaling on 2 ranks is that of one rank, with half the bytes."""
    options = ("--weight-scaling", "2d")
    assert losses(trained(2, *options))[0] == pytest.approx(losses(trained(1, *options))[0], rel=1e-12)
    assert (losses(trained(2, *options)) != losses(trained(2))).any()
    weights = [wire_bytes(trained.stdout(2, *o))[1] for o in (options, ())]
    assert 0.48 < weights[0] / weights[1] < 0.52


def wire_bytes(text):
    """The line of what a rank sends: gradients, weights."""
    line = re.search(r"^wire +a rank sends (\S+ \w+) of gradients \(\w+\) a step and (\S+ \w+) of weights", text, re.M)
    return [float(part.split()[0]) * {"B": 1, "kB": 1e3, "MB": 1e6}[part.split()[1]] for part in line.groups()]


@pytest.mark.parametrize("options", [
    (), ("--gather", "fp32"), ("--gather", "bf16"), ("--reduce", "bf16"), ("--zero", 2),
    *(("--recipe", recipe, "--max-steps", 2) for recipe in ("fp8-current", "fp8-delayed", "fp8-blockwise", "fp8-blockwise-fp32",
                                                            "nvfp4", "mxfp4-sr"))], ids=lambda o: "-".join(map(str, o)) or "default")
def test_what_is_sent_is_what_was_announced(trained, options):
    out = trained(2, *options)
    planned = run_well("--dry-run", "--world-size", 2, "--device", "cpu", *MODEL, *BATCH, *options).stdout
    assert wire_bytes(planned) == wire_bytes(trained.stdout(2, *options))
    announced = sum(wire_bytes(trained.stdout(2, *options)))
    sent = [event["bytes_sent"] for event in events(out, "train")]
    assert set(sent) == {sent[0]}
    print(f"{options}: {sent[0]} bytes a step were sent, {announced:.0f} announced")
    assert abs(sent[0] - announced) < 0.005 * announced + 1000


@pytest.mark.parametrize("recipe, gather, rank_counts", [
    ("mxfp8", "mx", (1, 2)), ("fp8-current", "mx", (1, 2)), ("nvfp4-nvidia", "mx", (1, 2)), ("fp8-current", "fp32", (1, 2)),
    ("mxfp8", "fp32", (1, 2)), ("mxfp8", "bf16", (2, 4)), ("fp8-current", "bf16", (2, 4))])
def test_statistics_are_of_all_ranks(data, tmp_path, recipe, gather, rank_counts):
    """Counts of the first step's operands, which have the same bits on so many ranks; and samples and a profile beside.
    One rank gathers nothing, and so quantizes FP32 where several gather BF16."""
    options = ["--max-steps", 4, "--quant-stats-every", 4, "--sample-every", 2, "--sample-tokens", 8, "--profile",
               "--recipe", recipe, "--gather", gather]
    found = []
    for ranks in rank_counts:
        out = tmp_path / str(ranks)
        run_ranks_well(ranks, *data, *MODEL, *BATCH, *options, "--out-dir", out)
        assert [event["step"] for event in events(out, "sample")] == [2, 4] and len(events(out, "profile")) == 1
        found.append(events(out, "quant"))
    assert len(found[0]) == len(found[1]) > 0
    for alone, together in zip(*found):
        for key in alone:
            if key == "sqnr_db":  # of sums in doubles, in another order
                assert together[key] == pytest.approx(alone[key], rel=1e-9)
            else:
                assert together[key] == alone[key], (alone, together)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints

def halfway(source, out):
    """A copy of the run as it was at step 4."""
    shutil.copytree(source, out)
    shutil.rmtree(out / "step_000008")
    (out / "latest").write_text("step_000004\n")
    return out


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_checkpoint_is_what_one_rank_writes(trained, ranks):
    for step in ("step_000004", "step_000008"):
        # The first while losses have the same bits; a bias of keys has a gradient of roundings alone, as AdamW sees it a
        # step like any other, and from then on is another one.
        worst_allowed = 1e-4 if step == "step_000004" else np.inf
        here, alone = trained(ranks) / step, trained(1) / step
        assert sorted(path.name for path in here.iterdir()) == sorted(path.name for path in alone.iterdir())
        check_loadable(here)
        for name in ("config.json", "tokenizer.bin"):
            assert (here / name).read_bytes() == (alone / name).read_bytes()
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (here / name).stat().st_size == (alone / name).stat().st_size
            a, b = load_file(here / name), load_file(alone / name)
            assert {key: (value.shape, value.dtype) for key, value in a.items()} == \
                   {key: (value.shape, value.dtype) for key, value in b.items()}
            scale = {key: np.abs(value).max() for key, value in b.items()}
            worst = max(np.abs(a[key] - b[key]).max() / scale[key] for key in a if scale[key] > 0)
            print(f"{ranks} ranks, {step}/{name}: off by up to {worst:.1e} of a tensor's largest value")
            assert worst < worst_allowed


@pytest.mark.parametrize("written,read", [(2, 2), (2, 1), (2, 4), (1, 2)])
def test_resume_on_another_number_of_ranks(trained, bounds, tmp_path, written, read):
    out = halfway(trained(written), tmp_path / "run")
    run_ranks_well(read, "--resume", "--out-dir", out)
    assert [event["step"] for event in steps(out)] == list(range(STEPS))
    if read == written:
        assert_same_run(out, trained(written))
    else:
        assert_near(out, trained(1), bounds, f"saved by {written}, resumed by {read}")
    check_loadable(latest(out))


def test_fewer_ranks_keep_the_step_of_a_resumed_run(data, tmp_path):
    """Whose tokens no option says: two ranks' micro-batches. Three can't share them."""
    two, said = tmp_path / "two", tmp_path / "said"
    assert run_ranks(2, *data, *MODEL, "--max-steps", 2, "--out-dir", two).returncode == 0
    shutil.copytree(two, said, symlinks=True)
    assert_refused(run_failing_ranks(3, "--resume", "--max-steps", 4, "--out-dir", two), f"{2 * B * T} tokens", "3 ranks",
                   "take another number of ranks", f"--total-batch-size {3 * B * T}")
    assert_refused(run_failing_ranks(4, "--resume", "--max-steps", 4, "--out-dir", two), "4 ranks",
                   "--batch-size 1 keeps the step")
    run_well("--resume", "--max-steps", 4, "--out-dir", two)
    run_well("--resume", "--max-steps", 4, "--total-batch-size", 2 * B * T, "--out-dir", said)
    assert_same_run(two, said)
    assert json.loads((latest(two) / "trainer_state.json").read_text())["next_sample"] == 4 * 2 * B


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """shim(directory, rank, ...): a program whose system calls of that rank fail as fault_shim.c says; and each rank's log
    of calls, in the directory."""
    library = tmp_path_factory.mktemp("shim") / "fault_shim.so"
    subprocess.run(["cc", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC",
                    Path(__file__).parent / "fault_shim.c", "-o", library], check=True)
    tried = run("--help", environment={"LD_PRELOAD": str(library), "ASAN_OPTIONS": "verify_asan_link_order=0"})
    if "fault_shim:" in tried.stderr:
        pytest.skip(f"system calls can't be trapped here: {tried.stderr.strip()}")

    def program(directory, rank=None, at=0):
        script = directory / "faulty.sh"
        script.write_text(
            "#!/bin/sh\n"
            "export FAULT_PATH=.tmp-step FAULT_AT=0\n"
            f"if [ $OMPI_COMM_WORLD_RANK = {rank} ]; then export FAULT_AT={at} FAULT_ERRNO={errno.ENOSPC}; fi\n"
            f"export FAULT_LOG={directory}/calls-$OMPI_COMM_WORLD_RANK LD_PRELOAD={library}\n"
            f"export ASAN_OPTIONS=$ASAN_OPTIONS:verify_asan_link_order=0\n"
            f"exec {TRAINER} \"$@\"\n")
        script.chmod(0o755)
        return str(script)
    return program


@pytest.fixture(scope="session")
def calls(trained, shim, tmp_path_factory):
    """Of each of 2 ranks, the calls that change files of the checkpoint at step 8."""
    directory = tmp_path_factory.mktemp("calls")
    out = halfway(trained(2), directory / "run")
    run_ranks_well(2, "--resume", "--out-dir", out, program=shim(directory))
    assert_same_run(out, trained(2))
    return [[line.split()[0] for line in (directory / f"calls-{rank}").read_text().splitlines()] for rank in (0, 1)]


@pytest.mark.parametrize("rank, name, last", [(1, "write", False), (1, "fsync", True), (0, "rename", False)])
def test_a_rank_that_cannot_write_its_part(trained, shim, calls, tmp_path, rank, name, last):
    numbers = [number for number, call in enumerate(calls[rank], start=1) if call == name]
    out = halfway(trained(2), tmp_path / "run")
    done = run_ranks(2, "--resume", "--out-dir", out, program=shim(tmp_path, rank, numbers[-1 if last else 0]))
    print(f"call {numbers[-1 if last else 0]} of {len(calls[rank])} of rank {rank}: {done.sentences}")
    assert done.returncode == 2, done
    assert any(speaker == rank and "No space left on device" in text for speaker, text in done.sentences), done
    assert latest(out).name == "step_000004" and not (out / "step_000008").exists()
    assert weights_and_moments(latest(out)) == weights_and_moments(trained(2) / "step_000004")
    run_ranks_well(2, "--resume", "--out-dir", out)
    assert_same_run(out, trained(2))
    assert not list(out.glob(".tmp*"))


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that are lost

def rank_pid(process, rank):
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"PPid:\t{process.pid}\n" in (entry / "status").read_text() and \
                    f"OMPI_COMM_WORLD_RANK={rank}\0" in (entry / "environ").read_text():
                return int(entry.name)
        except OSError:  # it has ended
            pass
    pytest.fail(f"rank {rank} doesn't run")


def wait_for_checkpoint(process, out):
    deadline = time.monotonic() + 60 * SLOWNESS
    while not (out / "latest").exists():
        assert process.poll() is None and time.monotonic() < deadline, finish(process, 1)
        time.sleep(0.02)


def wait_for_end(pid):
    """Of a process that isn't our child: gone, or a zombie."""
    deadline = time.monotonic() + 10 * SLOWNESS
    while time.monotonic() < deadline:
        try:
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return
        except OSError:
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} still runs")


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_a_rank_that_is_lost_ends_the_others(data, tmp_path, what):
    out = tmp_path / "run"
    process = start_ranks(4, *data, *MODEL, *BATCH, *ENDLESS, "--comm-timeout", 3, "--out-dir", out)
    wait_for_checkpoint(process, out)
    pid, begin = rank_pid(process, 1), time.monotonic()
    os.kill(pid, KILL if what == "kill" else signal.SIGSTOP)
    done = finish(process, END_SECONDS)
    print(f"{what}: ended after {time.monotonic() - begin:.1f} s with exit code {done.returncode}: {done.sentences}")
    assert done.returncode == (128 + 9 if what == "kill" else 4)  # a killed rank's code is mpirun's to choose
    said = "rank 1 ended during" if what == "kill" else "rank 1 has not answered for 3 s during"
    speakers = {rank for rank, text in done.sentences if said in text and "the last checkpoint is whole" in text}
    # mpirun may end a rank before it has spoken.
    assert speakers and speakers <= {0, 2, 3}
    assert all("rank 1 " in text for rank, text in done.sentences if rank != 1)
    wait_for_end(pid)
    saved = int(latest(out).name[5:])
    check_loadable(latest(out))
    run_ranks_well(2, "--resume", "--out-dir", out, "--max-steps", saved + 2)
    assert [event["step"] for event in steps(out)] == list(range(saved + 2))
    assert not list(out.rglob("*tmp*"))


def test_a_rank_that_is_lost_before_a_checkpoint_leaves_none(data, tmp_path):
    out = tmp_path / "run"
    process = start_ranks(2, *data, *MODEL, *BATCH, *ENDLESS, "--checkpoint-every", 0, "--out-dir", out)
    deadline = time.monotonic() + 60 * SLOWNESS
    while not (out / "log.jsonl").exists() or '"train"' not in (out / "log.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline, finish(process, 1)
        time.sleep(0.02)
    os.kill(rank_pid(process, 1), KILL)
    done = finish(process, END_SECONDS)
    assert any("no checkpoint was written yet" in text for _, text in done.sentences), done
    assert not any("is whole" in text for _, text in done.sentences), done


@pytest.mark.parametrize("number", [TERM, INT], ids=lambda s: s.name)
def test_a_signal_to_one_rank_stops_all(data, tmp_path, number):
    out = tmp_path / "run"
    process = start_ranks(2, *data, *MODEL, *BATCH, *ENDLESS, "--out-dir", out)
    wait_for_checkpoint(process, out)
    if number == TERM:  # meanwhile another run wants the same directory
        for options in ([*data, *MODEL, *BATCH], ["--resume"]):
            assert_refused(run_ranks(2, *options, "--out-dir", out), str(out))
    os.kill(rank_pid(process, 1), number)
    done = finish(process)
    assert done.returncode == 0 and done.sentences == [] and f"stopped by {number.name}" in done.stdout, done
    check_loadable(latest(out))
    assert int(latest(out).name[5:]) == len(steps(out))


@pytest.mark.parametrize("zero, micro_batches", [(0, 512), (1, 512), (2, 1024)])
def test_two_signals_to_one_rank_give_a_long_step_up(data, tmp_path, zero, micro_batches):
    """All give it up: with stage 2 in the next micro-batch, else in the last one, before which ranks don't meet."""
    out = tmp_path / "run"
    process = start_ranks(2, *data, *MODEL, "--total-batch-size", 2 * micro_batches * B * T, "--zero", zero, "--val-every", 0,
                          "--out-dir", out, "--max-steps", 20)
    deadline = time.monotonic() + 60 * SLOWNESS
    while not (out / "log.jsonl").exists() or '"config"' not in (out / "log.jsonl").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    pid, begin = rank_pid(process, 1), time.monotonic()
    os.kill(pid, INT)
    while "ShdPnd:\t0000000000000000\n" not in Path(f"/proc/{pid}/status").read_text():  # a second one would be lost
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(pid, INT)
    done = finish(process)
    print(f"--zero {zero}: ended after {time.monotonic() - begin:.1f} s, {len(steps(out))} steps")
    assert done.returncode == 0 and done.sentences == [] and "stopped by SIGINT" in done.stdout, done
    assert len(steps(out)) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Values that aren't finite

@pytest.fixture(scope="session")
def rare(trained, tmp_path_factory):
    """A text of 96 windows, one of them with a token that is nowhere else, and weights under which that token's loss
    isn't finite (see test_faults.py): the rank that has this window is the only one to see it."""
    directory = tmp_path_factory.mktemp("rare")
    tokens = markov_tokens(96 * T + 1, 1)
    tokens[41 * T + T // 2] = END_OF_TEXT
    write_tokens(directory / "train.bin", tokens)
    write_tokens(directory / "val.bin", markov_tokens(3000, 3))
    write_tokenizer(directory / "tokenizer.bin")
    weights = directory / "weights"
    shutil.copytree(latest(trained(1)), weights)
    tensors = load_file(weights / "model.safetensors")
    channels = [3, 40]
    tensors["transformer.ln_f.weight"][channels] = 0
    tensors["transformer.ln_f.bias"][channels] = 1
    tensors["transformer.wte.weight"][END_OF_TEXT, channels] = -3e38
    save_file(tensors, weights / "model.safetensors")
    return ["--train-data", directory / "train.bin", "--val-data", directory / "val.bin", "--init-from", weights,
            "--batch-size", B, *BATCH, "--max-steps", 12, "--val-every", 6]


@pytest.mark.parametrize("zero", [1, 2])
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(rare, tmp_path, zero):
    """12 steps of 8 windows see each window once."""
    runs = {}
    for ranks in (1, 2, 4) if zero == 1 else (1, 2):
        out = tmp_path / str(ranks)
        run_ranks_well(ranks, *rare, "--zero", zero, "--out-dir", out)
        train = events(out, "train")
        bad, = [event for event in train if event.get("finite") is False]
        assert bad["loss"] is None and "finite" in bad["skipped"]
        first, = events(out, "not_finite")
        # The rare token's logit is -Inf in every micro-batch. The one that reads the token is the first of 4 ranks' alone.
        at = {"layer": 0, "linear": "qkv", "rank": 2} if ranks == 4 else {"layer": 2, "linear": "lm_head"}
        assert first == ({"rank": 0} if ranks > 1 else {}) | at | {"event": "not_finite", "step": bad["step"], "gemm": "fprop"}
        assert all(loss is not None for _, loss in validations(out))
        assert json.loads((latest(out) / "trainer_state.json").read_text())["skipped"] == 1
        check_loadable(latest(out))
        start = load_file(rare[rare.index("--init-from") + 1] / "model.safetensors")
        weights = load_file(latest(out) / "model.safetensors")
        assert any((weights[name] != start[name]).any() for name in start)  # the others were applied
        runs[ranks] = bad["step"], np.array([event["loss"] for event in train if event is not bad])
    print(f"step {runs[1][0]} was skipped")
    for ranks in runs:
        assert runs[ranks][0] == runs[1][0]
        # A rank that had applied the step would have other weights from then on.
        difference = np.abs(runs[ranks][1] - runs[1][1]).max()
        print(f"{ranks} ranks: losses of the other steps off by up to {difference:.1e}")
        assert difference < 0.01


@pytest.mark.parametrize("zero", [1, 2])
def test_the_first_output_that_is_not_finite_is_searched_on_all_ranks(data, tmp_path, zero):
    """A gain of 3e38 makes the last block's QKV overflow, in every rank's batch."""
    run_ranks_well(1, *data, *MODEL, "--max-steps", 1, "--out-dir", tmp_path / "start")
    weights = tmp_path / "weights"
    shutil.copytree(latest(tmp_path / "start"), weights)
    tensors = load_file(weights / "model.safetensors")
    block = max(int(name.split(".")[2]) for name in tensors if ".h." in name)
    tensors[f"transformer.h.{block}.ln_1.weight"][:] = 3e38
    save_file(tensors, weights / "model.safetensors")
    done = run_failing_ranks(2, *data, "--batch-size", B, *BATCH, "--init-from", weights, "--zero", zero, "--recipe", "mxfp8",
                             "--max-steps", 20, "--out-dir", tmp_path / "run")
    assert done.returncode == 3
    first, = events(tmp_path / "run", "not_finite")
    assert {name: first[name] for name in ("layer", "linear", "gemm", "rank")} == {
        "layer": block, "linear": "qkv", "gemm": "fprop", "rank": 0}


def test_a_run_that_stays_not_finite_ends_with_3(data, tmp_path):
    done = run_failing_ranks(2, *data, *MODEL, "--learning-rate", "1e30", "--max-steps", 100, "--out-dir", tmp_path / "run")
    assert done.returncode == 3, done
    assert "wasn't finite 5 steps in a row" in done.sentences[0][1]
    assert len([event for event in events(tmp_path / "run", "train") if "skipped" in event]) == 5


# ---------------------------------------------------------------------------------------------------------------------
# Two hosts

class Hosts:
    """Two network namespaces with a cable between them: two hosts, as far as TCP and Open MPI can tell."""

    def __init__(self, scratch):
        self.names = [f"mxr{os.getpid()}{side}" for side in "ab"]
        self.addresses = ["10.78.0.1", "10.78.0.2"]
        # What Open MPI starts its daemon on another host with, instead of ssh HOST COMMAND.
        agent = scratch / "agent.sh"
        agent.write_text(f'#!/bin/sh\nshift\nexec ip netns exec {self.names[1]} sh -c "$*"\n')
        agent.chmod(0o755)
        self.mpirun = ["ip", "netns", "exec", self.names[0], *MPIRUN[:-1], "--mca", "plm_rsh_agent", str(agent),
                       "--mca", "oob_tcp_if_include", "eth0", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "eth0",
                       "--host", ",".join(f"{address}:1" for address in self.addresses), "-np"]

    def ip(self, *arguments):
        return subprocess.run(["ip", *arguments], text=True, capture_output=True)

    def connect(self):
        a, b = self.names
        cable = ["-n", a, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", b]
        commands = [["netns", "add", a], ["netns", "add", b], cable]
        for name, address in zip(self.names, self.addresses):
            commands += [["-n", name, "addr", "add", f"{address}/24", "dev", "eth0"],
                         ["-n", name, "link", "set", "eth0", "up"], ["-n", name, "link", "set", "lo", "up"]]
        return all(self.ip(*command).returncode == 0 for command in commands)

    def pids(self, program=""):
        found = [int(pid) for name in self.names for pid in self.ip("netns", "pids", name).stdout.split()]
        return [pid for pid in found if program in os.readlink(f"/proc/{pid}/exe")]

    def sent(self):
        """Bytes that have left the first host."""
        text = self.ip("netns", "exec", self.names[0], "cat", "/sys/class/net/eth0/statistics/tx_bytes").stdout
        return int(text)

    def remove(self):
        for pid in self.pids():
            os.kill(pid, KILL)
        for name in self.names:
            self.ip("netns", "del", name)


@pytest.fixture
def hosts(tmp_path):
    if shutil.which("ip") is None:
        pytest.skip("no ip (apt-get install iproute2)")
    hosts = Hosts(tmp_path)
    try:
        if not hosts.connect():
            pytest.skip("network namespaces can't be made here")
        yield hosts
    finally:
        hosts.remove()


def test_two_hosts_are_as_one(data, trained, hosts, tmp_path):
    run_ranks_well(2, *data, *MODEL, *BATCH, *LENGTH, "--out-dir", tmp_path / "run", mpirun=hosts.mpirun)
    assert_same_run(tmp_path / "run", trained(2))
    counted = sum(event["bytes_sent"] for event in events(tmp_path / "run", "train"))
    print(f"the cable carried {hosts.sent()} bytes one way, of which {counted} were counted in steps")
    assert counted < hosts.sent() < 1.5 * counted


def test_a_cable_that_is_cut_ends_both_hosts(data, hosts, tmp_path):
    """The ranks end. mpirun waits for its daemon on the other host until the cable is back, or for ever: Open MPI's way."""
    out = tmp_path / "run"
    process = start_ranks(2, *data, *MODEL, *BATCH, *ENDLESS, "--comm-timeout", 3, "--out-dir", out, mpirun=hosts.mpirun)
    wait_for_checkpoint(process, out)
    hosts.ip("-n", hosts.names[1], "link", "set", "eth0", "down")
    begin = time.monotonic()
    ranks = hosts.pids(Path(TRAINER).name)
    assert len(ranks) == 2
    for pid in ranks:
        wait_for_end(pid)
    print(f"both ranks ended {time.monotonic() - begin:.1f} s after the cable was cut")
    for pid in hosts.pids():
        os.kill(pid, KILL)
    done = finish(process)
    assert any("rank 1 has not answered for 3 s" in text for _, text in done.sentences), done
    check_loadable(latest(out))
    run_ranks_well(1, "--resume", "--out-dir", out, "--max-steps", int(latest(out).name[5:]) + 2)


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that differ

def wrapped(directory, text, rank=1):
    """A script that stands for the program; `text` may change what a rank runs."""
    script = directory / "wrapped.sh"
    script.write_text(f"#!/bin/sh\nprogram={TRAINER}\nif [ $OMPI_COMM_WORLD_RANK = {rank} ]; then\n{text}\nfi\n"
                      "exec $program \"$@\"\n")
    script.chmod(0o755)
    return str(script)


def assert_refused(done, *parts):
    assert done.returncode == 2, done
    sentence = done.only_sentence()
    print(sentence)
    for part in parts:
        assert part in sentence
    return sentence


def test_other_options_are_refused(data, tmp_path):
    program = wrapped(tmp_path, 'set -- "$@" --learning-rate 0.002')
    done = run_failing_ranks(2, *data, *MODEL, "--out-dir", tmp_path / "run", program=program)
    assert_refused(done, "rank 1 and rank 0 differ in their options", "--learning-rate 0.002")
    assert len(done.sentences) == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_ranks_switch_of_recipes_is_refused(data, tmp_path, rank):
    """Before the collectives, as many as there are recipes, that ask whether all ranks can switch."""
    program = wrapped(tmp_path, 'set -- "$@" --recipe-at 2:bf16', rank)
    done = run_failing_ranks(2, *data, *MODEL, "--max-steps", 4, "--out-dir", tmp_path / "run", program=program)
    assert_refused(done, "rank 1 and rank 0 differ in their options", "--recipe-at 2:bf16")


def test_another_models_weights_are_refused(data, tmp_path):
    for rank in "01":
        run_well(*data, *MODEL, "--seed", rank, "--max-steps", 1, "--out-dir", tmp_path / rank / "begun")
    done = run_failing_ranks(2, *data, *MODEL, "--max-steps", 1, "--init-from", "begun", "--out-dir", tmp_path / "run",
                             program=in_directory(tmp_path))
    assert_refused(done, "rank 1 and rank 0 differ in their checkpoint")


@pytest.mark.parametrize("other", ["text", "number"])
def test_other_questions_are_refused(data, tmp_path, other):
    question = '{"id": 1, "context": "A", "continuation": "%s"}\n'
    write_tokenizer(tmp_path / "tokenizer.bin")
    for rank in "01":
        (tmp_path / rank).mkdir()
        changed = rank == "1"
        lines = question % ("C" if changed and other == "text" else "B") * (2 if changed and other == "number" else 1)
        (tmp_path / rank / "questions.jsonl").write_text(lines)
    done = run_failing_ranks(2, *data, *MODEL, "--tokenizer", tmp_path / "tokenizer.bin", "--max-steps", 1, "--eval-requests",
                             "questions.jsonl", "--out-dir", tmp_path / "run", program=in_directory(tmp_path))
    assert_refused(done, "rank 1 and rank 0 differ in their --eval-requests")


def test_other_requests_to_score_are_refused(data, trained, tmp_path):
    write_tokenizer(tmp_path / "tokenizer.bin")
    for rank, letter in enumerate("BC"):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "q.jsonl").write_text('{"id": 1, "context": "A", "continuation": "%s"}\n' % letter)
    done = run_failing_ranks(2, "--score", trained(2), "--tokenizer", tmp_path / "tokenizer.bin", "--requests", "q.jsonl",
                             program=in_directory(tmp_path))
    assert_refused(done, "rank 1 and rank 0 differ in their --requests")
    assert done.stdout == ""


@pytest.mark.parametrize("other", ["length", "tokens"])
def test_other_data_is_refused(data, tmp_path, other):
    for rank in "01":
        (tmp_path / rank).mkdir()
        changed = rank == "1"
        tokens = markov_tokens(5000 - 100 * (changed and other == "length"), 7)
        tokens[2500:2600] = (tokens[2500:2600] + (changed and other == "tokens")) % END_OF_TEXT  # of 2 windows
        write_tokens(tmp_path / rank / "train.bin", tokens)
    done = run_failing_ranks(2, "--train-data", "train.bin", *MODEL, "--max-steps", 1, "--out-dir", tmp_path / "run",
                             program=in_directory(tmp_path))
    assert_refused(done, "rank 1 and rank 0 differ in their data")


def test_a_directory_that_not_all_ranks_see_is_refused(data, tmp_path):
    for rank in "01":
        (tmp_path / rank).mkdir()
    done = run_failing_ranks(2, *data, *MODEL, "--max-steps", 1, "--out-dir", "run", program=in_directory(tmp_path))
    assert_refused(done, "rank 1 of 2 doesn't see 'run/log.jsonl'", "--out-dir")
    (tmp_path / "1" / "run").mkdir()
    (tmp_path / "1" / "run" / "log.jsonl").write_text("of a run on this machine alone\n")
    done = run_failing_ranks(2, *data, *MODEL, "--max-steps", 1, "--out-dir", "run", program=in_directory(tmp_path))
    assert_refused(done, "rank 1 of 2 doesn't see 'run/log.jsonl'", "--out-dir")
    assert not list(tmp_path.glob("?/run/step_*"))


def test_a_sample_may_take_longer_than_a_rank_may_be_silent(data, tmp_path):
    out = tmp_path / "run"
    run_ranks_well(2, *data, *MODEL, "--max-steps", 30, "--learning-rate", 1e-2, "--sample-every", 30, "--sample-tokens", 2000,
                   "--temperature", 0, "--comm-timeout", 1, "--out-dir", out)
    text, ended = (events(out, kind)[-1] for kind in ("sample", "end"))
    assert len(text["text"]) >= 2000
    if ended["seconds"] - sum(e["seconds"] for e in events(out, "train")) < 1.5:
        pytest.skip("this machine makes the sample within the time that a rank may be silent")


def test_a_checkpoint_may_take_longer_than_a_rank_may_be_silent(data, tmp_path):
    """Each of rank 1's calls of fsync takes longer."""
    (tmp_path / "slow.c").write_text(
        "#include <sys/syscall.h>\n#include <unistd.h>\n"
        "int fsync(int file) { usleep(1500000); return (int)syscall(SYS_fsync, file); }\n")
    subprocess.run(["cc", "-D_GNU_SOURCE", "-shared", "-fPIC", tmp_path / "slow.c", "-o", tmp_path / "slow.so"], check=True)
    slow = f"export LD_PRELOAD={tmp_path}/slow.so ASAN_OPTIONS=$ASAN_OPTIONS:verify_asan_link_order=0"
    out = tmp_path / "run"
    run_ranks_well(2, *data, *MODEL, "--max-steps", 1, "--comm-timeout", 1, "--out-dir", out, program=wrapped(tmp_path, slow))
    assert latest(out).name == "step_000001"


def test_a_default_directory_is_one_for_all_ranks(data, tmp_path):
    """By rank 0's clock: here another rank's is hours away."""
    script = tmp_path / "elsewhere.sh"
    script.write_text(f"#!/bin/sh\ncd {tmp_path}\nexport TZ=UTC$OMPI_COMM_WORLD_RANK\nexec {TRAINER} \"$@\"\n")
    script.chmod(0o755)
    run_ranks_well(2, *data, *MODEL, "--max-steps", 1, program=str(script))
    made, = (tmp_path / "runs").iterdir()
    assert latest(made).name == "step_000001"


def in_directory(directory):
    """The program, each rank in the directory of its number."""
    script = directory / "placed.sh"
    script.write_text(f"#!/bin/sh\ncd {directory}/$OMPI_COMM_WORLD_RANK\nexec {TRAINER} \"$@\"\n")
    script.chmod(0o755)
    return str(script)


def test_another_build_is_refused(data, tmp_path):
    """Of any part of the program: here by a byte behind its end."""
    (tmp_path / "other").write_bytes(Path(TRAINER).read_bytes() + b"\0")
    (tmp_path / "other").chmod(0o755)
    done = run_failing_ranks(2, *data, *MODEL, "--out-dir", tmp_path / "run",
                             program=wrapped(tmp_path, f"program={tmp_path}/other"))
    assert_refused(done, "rank 1 and rank 0 differ in their program")


@pytest.mark.parametrize("options,parts", [
    (["--total-batch-size", 3 * B * T], ["isn't a multiple", "2 ranks", f"take {2 * B * T}"]),
    (["--world-size", 4], ["--world-size is 4", "2 ranks"]),
    (["--world-size", 1], ["--world-size is 1", "2 ranks were started"]),
    (["--weight-scaling", "2d", "--operand", "dgrad-w=e5m2"], ["--weight-scaling 2d", "e4m3 and e5m2"]),
    (["--resume"], ["no checkpoint to resume from"])],
    ids=["total-batch-size", "world-size-4", "world-size-1", "2d-formats", "resume"])
def test_refusals(data, tmp_path, options, parts):
    assert_refused(run_failing_ranks(2, *data, *MODEL, *options, "--out-dir", tmp_path / "run"), *parts)
    assert not (tmp_path / "run").exists()


def test_world_size_without_a_launcher_is_refused(data, tmp_path):
    done = run(*data, *MODEL, "--world-size", 2, "--out-dir", tmp_path / "run", environment=MPI_ENVIRONMENT)
    assert done.returncode == 2
    ours = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert "--world-size is 2" in one_sentence("\n".join(ours))


def test_a_finished_runs_directory_is_refused(data, trained):
    before = weights_and_moments(latest(trained(2)))
    assert_refused(run_failing_ranks(2, *data, *MODEL, *BATCH, "--out-dir", trained(2)), str(trained(2)))
    assert weights_and_moments(latest(trained(2))) == before
