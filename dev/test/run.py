"""Runs every test and prints one line for each file, then "N passed, N failed".

C tests are cmocka programs BUILD_DIR/test_*, read through its TAP output; Python tests are dev/test/test_*.py under
pytest. What a test prints besides (errors, bounds, margins) goes to BUILD_DIR/test-logs/NAME.log, and to the console where
it fails. Files run two at a time, since much of a test is one thread's.
"""

import argparse
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"test_mx_exhaustive"}  # make test-exhaustive
# Kernels, on the CPU's shim. A barrier that is missing shows in one order of the threads and not in another.
HOSTCUDA = {f"test_cuda_{name}" for name in ("attention", "authors", "gpt", "ops", "quantize")}
IN_SEVERAL_ORDERS = ["env", "HOSTCUDA_SEED=mixed"]
LONGEST = {"test_ranks", "test_trainer"}  # begun first, so that none runs on alone
RANKS = {"test_comm", "test_comm_nccl", "test_param"}  # also on several ranks
ALL_SKIPPED = 5  # pytest's exit code, of a file whose tests need a package that isn't there
TIMEOUT_SECONDS = 900 * float(os.environ.get("TEST_SLOWNESS", 1))


def run_logged(command, log, environment):
    with open(log, "wb") as out:
        try:
            done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
                                  stdin=subprocess.DEVNULL, timeout=TIMEOUT_SECONDS)
            return done.returncode
        except subprocess.TimeoutExpired:
            out.write(f"\nstopped after {TIMEOUT_SECONDS} s\n".encode())
            return 124


def under_mpirun(name):
    """Returns names and commands of a test on 1 to 4 ranks, and of collectives on 3 with messages
    cut into small pieces. Open MPI's leaks aren't ours."""
    if not shutil.which("mpirun"):
        return []
    asan = "ASAN_OPTIONS=" + os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"
    mpirun = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-np"]
    plain = [(f"{name}-{n}-ranks", ["env", asan, "OMP_NUM_THREADS=1", *mpirun, str(n)]) for n in (1, 2, 3, 4)]
    if not name.startswith("test_comm"):
        return plain
    return plain + [(f"{name}-pieces", ["env", asan, "OMP_NUM_THREADS=2", "COMM_PIECE_BYTES=4112", *mpirun, "3"])]


def count_cmocka(text):
    """Counts cmocka's TAP lines: "ok 3 - name", "not ok 4 - name", and of a skipped test "not ok 5
    # SKIP name"."""
    passed = len(re.findall(r"^ok \d+ - ", text, re.M))
    failed = len(re.findall(r"^not ok \d+ - ", text, re.M))
    skipped = len(re.findall(r"^(?:not )?ok \d+ # SKIP", text, re.M))
    return passed, failed, skipped


def count_pytest(text):
    summary = text.rstrip().rsplit("\n", 1)[-1]
    number = lambda word: sum(int(n) for n in re.findall(rf"(\d+) {word}", summary))
    return number("passed"), number("failed") + number("error"), number("skipped")


def parse_arguments():
    """Returns the directory of the build, the names of the tests that are wanted, none for all, and how many run at a
    time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, metavar="BUILD_DIR", help="where make has put programs and tests")
    parser.add_argument("wanted", nargs="*", metavar="NAME", help="only these, such as test_mx or test_data")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="files that run at a time (default: 2)")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least one test runs at a time")
    if not options.build.is_dir():
        parser.error(f"there is no directory {options.build}: make tests BUILD=... builds into it")
    return options.build.resolve(), options.wanted, options.jobs


class Result(NamedTuple):
    name: str
    code: int
    passed: int
    failed: int
    skipped: int
    seconds: float
    log: Path


def run_test(name, command, count, log, environment):
    start = time.monotonic()
    code = run_logged(command, log, environment)
    passed, failed, skipped = count(log.read_text(errors="replace"))
    if code != 0 and failed == 0 and not (code == ALL_SKIPPED and skipped):  # it crashed, or never began
        failed = 1
    return Result(name, code, passed, failed, skipped, time.monotonic() - start, log)


def print_result(r):
    notes = (f", {r.failed} failed" if r.failed else "") + (f", {r.skipped} skipped" if r.skipped else "")
    print(f"{r.name:24} {r.passed:4} passed{notes}  ({r.seconds:.1f} s)", flush=True)
    text = r.log.read_text(errors="replace")
    if r.failed:
        passes = r"^=+ PASSES =+$.*?(?=^=+ short test summary|^\d+ failed|\Z)"
        print(re.sub(passes, "", text, flags=re.M | re.S)[-6000:])
        print(f"exit code {r.code}; all of it is in {r.log}")
    elif r.skipped:
        for line in re.findall(r"^SKIPPED.*|^(?:not )?ok \d+ # SKIP.*", text, re.M):
            print(f"  {line}")


def list_tests(build, jobs):
    """Returns of each test its name, its command, and what counts its results. Tests in Python have their part of the
    cores: with two threads beside other programs a run took 1.4 to 1.7 times as long as with one."""
    part = max(1, len(os.sched_getaffinity(0)) // jobs)
    threads = f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', part)}"
    programs = sorted(p for p in build.glob("test_*") if os.access(p, os.X_OK) and p.is_file() and not p.suffix)
    tests = [(p.name, [*(IN_SEVERAL_ORDERS if p.name in HOSTCUDA else []), str(p)], count_cmocka)
             for p in programs if p.name not in LEFT_OUT]
    tests += [(name, command + [str(p)], count_cmocka) for p in programs if p.name in RANKS
              for name, command in under_mpirun(p.name)]
    for p in sorted((ROOT / "dev/test").glob("test_*.py")):
        command = ["env", threads, sys.executable, "-m", "pytest", "-q", "-rsP", "--durations=10", "-p", "no:cacheprovider", str(p)]
        tests.append((p.stem, command, count_pytest))
    return sorted(tests, key=lambda test: test[0] not in LONGEST)


def main():
    build, wanted, jobs = parse_arguments()
    logs = build / "test-logs"
    logs.mkdir(parents=True, exist_ok=True)
    # Threads that wait in futexes rather than spin: small tests are no slower, and on a busy machine many times faster.
    environment = dict(os.environ, CMOCKA_MESSAGE_OUTPUT="TAP", PYTHONDONTWRITEBYTECODE="1", MPLBACKEND="Agg",
                       OMP_WAIT_POLICY="passive", MXCAST=str(build / "mxcast"), PROXY=str(build / "proxy"),
                       TRAINER=str(build / "train_gpt_mxfp8"))
    tests = [test for test in list_tests(build, jobs) if not wanted or test[0] in wanted]
    results = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            for result in pool.map(lambda test: run_test(*test, logs / f"{test[0]}.log", environment), tests):
                print_result(result)
                results.append(result)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    print(f"what the tests print (errors, bounds, margins) is in {logs}")
    passed, failed, skipped = (sum(getattr(r, what) for r in results) for what in ("passed", "failed", "skipped"))
    if passed + failed == 0:
        print(f"no test ran: {build} has none of {', '.join(wanted) or 'them'}")
        return 1
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
