"""What has threads, under ThreadSanitizer. usage: run_tsan.py BUILD_DIR TEST...

The C tests that are named, then a short training run that validates, samples, checkpoints and resumes, and mxcast, all with two
threads. Stops at the first race.

Nothing is suppressed by hand. libarcher, which clang's OpenMP runtime loads by itself, tells the sanitizer where threads fork,
join and wait; without it every parallel loop looks like a race. Code that isn't instrumented (that runtime, cmocka, cJSON)
is not reported (ignore_noninstrumented_modules); oneDNN, which would be most of the run, is left out of the build.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from trainer import make_data

THREADS = "2"


def run(name, command):
    environment = dict(os.environ, OMP_NUM_THREADS=THREADS, OMP_WAIT_POLICY="passive",
                       TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1")
    start = time.monotonic()
    done = subprocess.run([str(word) for word in command], env=environment, text=True, errors="replace",
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    races = len(re.findall("WARNING: ThreadSanitizer", done.stdout))
    print(f"{name:24} {races} races, exit code {done.returncode}  ({time.monotonic() - start:.1f} s)", flush=True)
    if races or done.returncode != 0:
        sys.exit(done.stdout[-8000:])


def main():
    build = Path(sys.argv[1]).resolve()
    for name in sys.argv[2:]:
        run(name, [build / name])
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        data = make_data(scratch / "data")
        train = [build / "train_gpt_mxfp8", "--out-dir", scratch / "run", "--threads", THREADS]
        model = ["--vocab-size", 65, "--layers", 2, "--heads", 2, "--channels", 64, "--max-seq-len", 32, "--batch-size", 4]
        watch = ["--val-every", 2, "--val-steps", 2, "--sample-every", 2, "--sample-tokens", 8, "--quant-stats-every", 2,
                 "--checkpoint-every", 2, "--total-batch-size", 256]
        run("train", [*train, *data, *model, *watch, "--max-steps", 4])
        run("train --resume", [*train, "--resume", "--max-steps", 6])
        np.save(scratch / "x.npy", np.random.default_rng(0).standard_normal((256, 192), np.float32))
        run("mxcast stats", [build / "mxcast", "stats", scratch / "x.npy"])
        np.fromfile(scratch / "x.npy", np.float32)[-256 * 192:].tofile(scratch / "x.f32")
        run("mxcast encode", [build / "mxcast", "encode", "--rows", 256, "--cols", 192, "--input", scratch / "x.f32",
                              "--elements", scratch / "x.e4m3"])
    print("no race")


if __name__ == "__main__":
    main()
