"""README.md and doc/ say what the program does: their commands run, and print what stands there.

A comment before a block of code, which isn't shown where Markdown is rendered, says what the block is:

    <!-- runs -->                 commands; with `runs with OPTIONS` these are added to train_gpt_mxfp8's
    <!-- prints -->               what the commands before print: lines in a row, but for what "..." leaves out
    <!-- prints: COMMAND -->      what that command prints
    <!-- prints; numbers vary --> ... in which numbers depend on the machine; `values vary`: all but a line's label
    <!-- prints; varies: WORDS --> ... in which lines that begin with one of the words do: only it is compared, and they
                                  may be missing, here or there
    <!-- prints where ... -->     only where that is so (CONDITIONS)
    <!-- log -->                  lines of log.jsonl: their keys are compared with a run's
    <!-- files of a checkpoint --> its files, each with what is in it
    <!-- bytes of FILE -->        as xxd shows them

Commands run in a copy of the tree, whose `my.txt` is program text.
"""

import json
import os
import re
import subprocess
import sys
from decimal import Decimal
from typing import NamedTuple

import pytest

from trainer import ENVIRONMENT, ROOT, SLOWNESS, TRAINER, events, latest, run_well

sys.path.insert(0, str(ROOT / "scripts"))
from experiments import EXPERIMENTS  # noqa: E402

MANUAL = [ROOT / "README.md", *sorted((ROOT / "doc").glob("*.md"))]
PAGES = MANUAL + [p for pattern in ("CONTRIBUTING.md", "data/*.md", "dev/**/*.md") for p in sorted(ROOT.glob(pattern))]
MXCAST = os.environ.get("MXCAST", ROOT / "build/mxcast")
PROXY = os.environ.get("PROXY", ROOT / "build/proxy")
# By the make that runs the tests.
HANDED_DOWN = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CUDA", "BUILD", "EXTRA_CFLAGS"}
# As root, and with more ranks than cores, Open MPI wants to be asked.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
CONDITIONS = {"there is CUDA and no driver": lambda: "driver            none" in run_well("--device-info").stdout}
# Options of other programs.
FOREIGN = {"help", "include", "gpus", "shm-size", "ipc", "build-arg", "allow-run-as-root", "bind-to", "oversubscribe", "logdir", "bind",
           "directory"}


class Block(NamedTuple):
    page: str
    line: int
    mark: str
    lines: list


def blocks():
    """Every block of code that has a mark, in the order of the pages."""
    for page in PAGES:
        mark, fenced, lines = None, False, page.read_text().splitlines()
        for number, line in enumerate(lines):
            found = re.fullmatch(r"<!-- (.*) -->", line)
            assert found or not line.startswith("<!--"), f"{page}:{number + 1}: a mark is one line"
            if found:
                mark, first = found[1], number + 1
            elif mark and line.strip():
                fenced = line.startswith("```")
                assert fenced or line.startswith("    "), f"{page}:{first}: <!-- {mark} --> is before no block of code"
                yield Block(str(page.relative_to(ROOT)), first, mark, list(code_from(lines, number, fenced)))
                mark = None


def code_from(lines, number, fenced):
    if fenced:
        yield from lines[number + 1:lines.index("```", number + 1)]
        return
    end = number
    while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
        end += 1
    text = [line[4:] for line in lines[number:end]]
    while not text[-1]:
        text.pop()
    yield from text


MARKED = list(blocks())


def marked(*kinds):
    chosen = [b for b in MARKED if re.split(r"[ :;]", b.mark)[0] in kinds]
    return pytest.mark.parametrize("block", chosen, ids=lambda b: f"{b.page}:{b.line}")


def section(block):
    """The text between the headings before and after the block."""
    lines = (ROOT / block.page).read_text().splitlines()
    heads = [i for i, line in enumerate(lines) if re.match(r"#+ ", line)] + [len(lines)]
    first = max([i for i in heads if i < block.line], default=0)
    return "\n".join(lines[first:min(i for i in heads if i > block.line)])


# Commands and what they print ---------------------------------------------------------------------


class Shell:
    """Runs commands in a directory, those of a block once."""

    def __init__(self, directory):
        self.directory, self.printed = directory, {}

    def run(self, commands):
        """The lines that they print."""
        done = subprocess.run(["bash", "-euc", commands], cwd=self.directory, env=ENVIRONMENT | AS_ROOT, text=True,
                              errors="replace", capture_output=True, timeout=300 * SLOWNESS, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{commands}\n{done.stderr}{done.stdout[-2000:]}"
        return done.stdout.splitlines()

    def run_page(self, page, line):
        """What the page's commands up to that line print, the last ones of them."""
        printed = []
        for block in MARKED:
            if block.page == page and block.line <= line and block.mark.startswith("runs"):
                if block.line not in self.printed.setdefault(page, {}):
                    self.printed[page][block.line] = self.run(commands_of(block))
                printed = self.printed[page][block.line]
        return printed


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """The tree as `make` leaves it, where commands may write: directories are links, build/ and .venv/ have what is
    called."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("data", "scripts", "dev", "doc", "README.md"):
        (root / name).symlink_to(ROOT / name)
    (root / "train_gpt_mxfp8").symlink_to(TRAINER)
    (root / "build").mkdir()
    (root / "build/mxcast").symlink_to(MXCAST)
    (root / "build/proxy").symlink_to(PROXY)
    (ROOT / "build/demo").mkdir(parents=True, exist_ok=True)
    (root / "build/demo").symlink_to(ROOT / "build/demo")
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (root / "my.txt").write_text("".join(p.read_text() for p in sorted((ROOT / "llmc").rglob("*.[ch]"))))
    return Shell(root)


def commands_of(block):
    text = "\n".join(block.lines).replace("\\\n", " ")
    if added := re.fullmatch(r"runs with (.*)", block.mark):
        text = re.sub(r"^(\./train_gpt_mxfp8 .*)$", rf"\1 {added[1]}", text, flags=re.M)
    return text


def without_numbers(text):
    text = re.sub(r"\d[\d.,]*(e[-+]?\d+)?[kMGT]?", "#", text)
    return re.sub(r"(#[dhms] ?)+", "#s ", re.sub(r"\s+", " ", text))


def comparison(mark):
    """What a mark says of how lines are compared: (whether two are alike, whether a line may be missing)."""
    if varying := re.search(r"varies: (.*)", mark):
        words = varying[1].split()
        varies = lambda line: line.split()[:1] != [] and line.split()[0] in words
        return lambda a, b: a == b or varies(a) and a.split()[0] == (b.split() or [""])[0], varies
    if "numbers vary" in mark:
        return lambda a, b: without_numbers(a) == without_numbers(b), lambda line: False
    if "values vary" in mark:
        label = lambda line: re.split(r"\s{2,}|:", line)[0]
        return lambda a, b: label(a) == label(b), lambda line: False
    return lambda a, b: a == b, lambda line: False


def check_lines(shown, printed, alike, may_be_missing):
    """`shown` are lines of `printed`, one after the other but for what "..." leaves out."""
    at, anywhere = 0, True
    for line in (line.rstrip() for line in shown):
        if line.strip() == "...":
            anywhere = True
            continue
        found = next((i for i in range(at, len(printed)) if alike(line, printed[i].rstrip())), None)
        if found is None and may_be_missing(line):
            continue
        between = [] if found is None or anywhere else printed[at:found]
        assert found is not None and all(may_be_missing(other) for other in between), \
            f"the page has\n  {line}\nthe program prints\n  " + "\n  ".join(printed if anywhere else printed[at:at + 3])
        at, anywhere = found + 1, False


@marked("runs", "prints")
def test_commands(shell, block):
    if where := re.search(r"where ([^;]*)", block.mark):
        if not CONDITIONS[where[1]]():
            pytest.skip(f"not where {where[1]}")
    command = re.match(r"prints: ([^;]*)", block.mark)
    printed = shell.run(command[1]) if command else shell.run_page(block.page, block.line)
    if block.mark.startswith("prints"):
        check_lines(block.lines, printed, *comparison(block.mark))
    if re.search("(numbers|values) vary", block.mark):
        assert "AVX" in section(block), "figures of a machine, and no word on its instructions"


@marked("bytes")
def test_bytes(shell, block):
    shell.run_page(block.page, block.line)
    data = (shell.directory / block.mark.removeprefix("bytes of ")).read_bytes()
    for line in block.lines:
        if line != "*":
            offset, digits = re.match(r"([0-9a-f]{8}): ((?:[0-9a-f]{2,4} )+)", line + " ").groups()
            expected = bytes.fromhex(digits)
            assert data[int(offset, 16):][:len(expected)] == expected, line


# The log and a checkpoint -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_of_all(tmp_path_factory):
    """A run that logs every event, on data whose tokenizer data/prepare.py trained."""
    out = tmp_path_factory.mktemp("run")
    text = out / "text.txt"
    text.write_text((ROOT / "README.md").read_text() * 4)
    subprocess.run([sys.executable, ROOT / "data/prepare.py", "--input", text, "--tokenizer", "train:300", "--out-dir",
                    out / "data"], check=True, capture_output=True)
    requests = out / "requests.jsonl"
    requests.write_text("".join(json.dumps({"id": i, "context": "a", "continuation": text, "task": "quiz", "question": 0, "gold": i == 0})
                                + "\n" for i, text in enumerate((" b", " c"))))
    run_well("--train-data", out / "data/train_*.bin", "--val-data", out / "data/val_*.bin", "--layers", 1, "--heads", 2,
             "--channels", 64, "--max-seq-len", 32, "--batch-size", 2, "--max-steps", 6, "--val-every", 2, "--val-steps", 1,
             "--eval-requests", requests, "--sample-every", 2, "--sample-tokens", 4, "--quant-stats-every", 2, "--gradient-bias-every", 2, "--profile",
             "--recipe-at", "2:bf16", "--checkpoint-every", 2, "--out-dir", out / "run")
    return out / "run"


def example(line):
    """The object of a line of the page, in which "..." stands for any value."""
    text = re.sub(r"\{\.\.\.\}", "{}", line)
    text = re.sub(r'("\w+":)\.\.\.', r"\1 0", text).replace(",...]", "]")
    return json.loads(text)


def keys(value):
    """Names of an object's fields, and of the fields of objects in it, where there are any."""
    if isinstance(value, list):
        return [keys(value[0])] if value else []
    return {name: keys(inner) for name, inner in value.items() if name} if isinstance(value, dict) else None


def same_keys(shown, logged):
    if isinstance(shown, dict) and shown:
        return list(shown) == list(logged) and all(same_keys(shown[name], logged[name]) for name in shown)
    return not isinstance(shown, list) or not shown or same_keys(shown[0], logged[0])


@marked("log")
def test_log(run_of_all, block):
    logged = events(run_of_all)
    shown = [example(line) for line in block.lines]
    assert {e["event"] for e in shown} == {e["event"] for e in logged}
    for line in shown:
        alike = [e for e in logged if e["event"] == line["event"]]
        assert any(same_keys(keys(line), keys(e)) for e in alike), f"{line}\n{alike[0]}"


@marked("files")
def test_checkpoint_files(run_of_all, block):
    assert sorted(line.split()[0] for line in block.lines) == sorted(p.name for p in latest(run_of_all).iterdir())


# Names --------------------------------------------------------------------------------------------


def help_of(command):
    done = subprocess.run([str(word) for word in command] + ["--help"], cwd=ROOT, env=ENVIRONMENT, text=True,
                          capture_output=True, timeout=120 * SLOWNESS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def options_in(text):
    """Names after --; of --[no-]name both."""
    names = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])", text))
    for name in re.findall(r"--\[no-\]([a-z-]+)", text):
        names |= {name, f"no-{name}"}
    return names


@pytest.fixture(scope="module")
def own_help():
    return help_of([TRAINER])


def inline_code(text):
    return re.findall(r"`([^`\n]+)`", text)


def test_options_that_pages_name_exist(own_help):
    known = FOREIGN | options_in(own_help)
    for command in ([PROXY], [MXCAST, "encode"], [MXCAST, "stats"]):
        known |= options_in(help_of(command))
    for script in (p for folder in ("scripts", "data", "dev") for p in (ROOT / folder).rglob("*.py")):
        known |= set(re.findall(r'add_argument\(\s*"--([a-z-]+)"', script.read_text()))
    known |= set(re.findall(r'"--([a-z-]+)"', (ROOT / "dev/bench/bench_ops.c").read_text()))
    pages = [page for page in PAGES if "results" not in page.parts]  # reports have the options of their commits
    unknown = {str(page.relative_to(ROOT)): sorted(options_in(page.read_text()) - known - {f"no-{name}" for name in known})
               for page in pages}
    assert not any(unknown.values()), {page: names for page, names in unknown.items() if names}


def test_every_option_is_in_the_manual(own_help):
    named = set().union(*(options_in(page.read_text()) for page in MANUAL))
    listed = set(re.findall(r"^  --(?:\[no-\])?([a-z][a-z0-9-]*)", own_help, re.M))
    assert len(listed) > 60
    assert not listed - named, f"neither README.md nor doc/ says what these are for: {sorted(listed - named)}"


def test_recipes_and_presets_exist(own_help):
    listed = set(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)*", re.sub(r"\s+", " ", own_help)))
    listed |= set(re.findall(r"(?:gpt2|nemotron|olmo)-\w+", own_help))
    text = "\n".join(page.read_text() for page in MANUAL)
    name = r"bf16|fp32|mxfp\d[\w-]*|fp8-[\w-]+|nvfp4[\w-]*|gpt2-\w+|olmo-n\d+|nemotron-\w+"
    named = {code for code in inline_code(text) if re.fullmatch(name, code)} - set(EXPERIMENTS)
    assert len(named) > 15 and not named - listed, f"no recipe or preset: {sorted(named - listed)}"
    recipes = re.search(r"--recipe NAME[^(]*\(([^;]*);", own_help)[1]
    assert not set(re.findall(r"[\w-]+", recipes)) - named


FILES = [str(p.relative_to(ROOT)) for top in ("*", "llmc/**/*", "dev/**/*", "data/*", "scripts/**/*", "doc/*", ".ci/*",
                                               ".github/**/*") for p in ROOT.glob(top) if p.is_file()]
NAMES = {path.rsplit("/", 1)[-1] for path in FILES}
GENERATED = {"report.md", "EXPERIMENT.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_exist(page):
    """Paths of the tree, and in inline code also bare names of source files."""
    text = page.read_text()
    paths = re.findall(r"(?<![\w/.*:-])((?:llmc|dev|data|scripts|doc)/[\w./*-]*[\w*/])", text)
    exists = lambda pattern: any(ROOT.glob(pattern)) or any(page.parent.glob(pattern))
    missing = [path for path in paths if not exists(path.replace("NAME", "*"))]
    names = [code for code in inline_code(text) if re.fullmatch(r"[\w.-]+\.(c|h|cu|cuh|cpp|py|sh|mk|md)", code)]
    assert not missing + [name for name in names if name not in NAMES | GENERATED]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_patterns_match_training_data_alone(page):
    """A data set's directory also holds tokenizer.bin and val_*.bin."""
    assert not re.findall(r"[\w./-]*/\*\.bin", page.read_text())


def slug(heading):
    """GitHub's anchor of a heading."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in [slug(h) for h in re.findall(r"^#+ (.*)$", without_code(file.read_text()), re.M)], target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_prose_is_wrapped(page):
    kept = ("|", "    ", "![", "<", "  |")  # tables, code, pictures, comments
    lines = without_code(page.read_text()).splitlines()
    assert not [line for line in lines if len(line) > 100 and not line.startswith(kept)]


def test_make_targets_exist():
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in HANDED_DOWN}
    make = lambda *words: subprocess.run(["make", *words], cwd=ROOT, env=environment, text=True,
                                         capture_output=True).stdout
    targets = set(re.findall(r"^([a-z][\w-]*):", make("-pn", "CUDA=0", "found"), re.M))
    listed = make("-s", "help")
    named = set(re.findall(r"^make ([a-z][\w-]*)", listed, re.M)) | set(re.findall(r"\b(test-\w+):", listed))
    assert len(named) > 15 and not named - targets
    for page in PAGES:
        for code in inline_code(page.read_text()) + re.findall(r"^    (.*)", page.read_text(), re.M):
            for target in re.findall(r"^(?:[A-Z]+='.*' )?make ([a-z][\w-]*)(?![\w/])", code):
                assert target in targets, f"{page.relative_to(ROOT)}: make {target}"


@pytest.mark.parametrize("page", MANUAL, ids=lambda p: str(p.relative_to(ROOT)))
def test_figures_name_their_instructions(page):
    text = " ".join(page.read_text().split())
    if re.search(r"(hours?|minutes?)( and a half)? (of|on) (one|two)|\btokens/s \|", text):
        assert "AVX-512 BF16" in text and "AVX2" in text


def test_comments_are_wrapped():
    """Lines that are a comment alone, and those of block comments; rules under headings, tables and commands may be
    longer."""
    files = subprocess.run(["git", "ls-files", "*.c", "*.h", "*.cu", "*.cuh", "*.cpp"], cwd=ROOT, capture_output=True,
                           text=True, check=True).stdout.split()
    for name in files:
        text = (ROOT / name).read_text()
        lines = [line for line in re.findall(r"^ *//.*$", text, re.M) if not line.endswith("---")]
        for block in re.findall(r"^/\*$(.*?)^\*/$", text, re.M | re.S):
            lines += [line for line in block.splitlines() if not line.startswith("  ")]
        assert not [line for line in lines if len(line) > 100], name


@pytest.mark.parametrize("recipe, heading, columns", [
    ("bf16", "GB of a step, by these:", {("h100", "gpt2-124M", 32): 2, ("h100", "gpt2-1558M", 16): 4}),
    ("mxfp8", "`mxfp8` on the same cards", {("h100", "gpt2-124M", 32): 1, ("h100", "gpt2-1558M", 16): 2,
                                            ("b200", "gpt2-1558M", 16): 3})])
def test_a_step_s_bytes_are_those_of_the_plan(recipe, heading, columns):
    """The last rows of the tables in doc/traffic.md, beside --dry-run."""
    table = (ROOT / "doc/traffic.md").read_text().split(heading)[1].lstrip().split("\n\n")[1 if recipe == "mxfp8" else 0]
    last = [cell.strip() for cell in table.strip().splitlines()[-1].strip("|").split("|")]
    for (card, model, batch), column in columns.items():
        done = run_well("--dry-run", "--device", card, "--model", model, "--recipe", recipe, "--batch-size", batch)
        row, = re.findall(r"^ *all operations +[\d.]+ +[\d.]+ +([\d.]+) +([\d.]+)", done.stdout, re.MULTILINE)
        moved = sum(map(float, row)) / 1e3
        print(f"{model} on {card}, {recipe}: {moved:.1f} GB, on the page {last[column]}")
        assert f"{moved:.1f}" == last[column]


# Figures of the results ---------------------------------------------------------------------------


RESULTS = ROOT / "dev/results"


class Figure(NamedTuple):
    text: str
    unit: str
    numbers: list  # the mean and its interval's ends, as they stand there


def figures(text):
    number = r"([-+]?\d+(?:\.\d+)?)"
    found = re.finditer(rf"{number}( %)? \[{number}, {number}\]", " ".join(text.split()))
    return [Figure(m[0], m[2] or "", [m[1], m[3], m[4]]) for m in found]


def rounds_to(shown, exact):
    """Whether a page's number, rounded itself and perhaps without zeros at its end, rounds to the one that is shown."""
    digits, more = (len(number.partition(".")[2]) for number in (shown, exact))
    if more <= digits:
        return Decimal(exact) == Decimal(shown)
    return abs(Decimal(exact) - Decimal(shown)) <= (Decimal(10) ** -digits + Decimal(10) ** -more) / 2


def is_among(figure, others):
    """Whether one of the others rounds to it, or, as something is said to take so much off, one of the other sign."""
    negated = lambda numbers: [str(-Decimal(numbers[i])) for i in (0, 2, 1)]
    alike = [other.numbers for other in others if other.unit == figure.unit]
    if figure.text[0] not in "+-":
        alike += map(negated, alike[:])
    return any(all(map(rounds_to, figure.numbers, numbers)) for numbers in alike)


def tables_of(page):
    """A page's tables; of the proxy's, which tells of the reports beside it, theirs."""
    pages = sorted(set(page.parent.glob("*.md")) - {page}) if page == RESULTS / "proxy/README.md" else [page]
    return "\n".join(line for p in pages for line in p.read_text().splitlines() if line.startswith("|"))


def test_results_have_the_figures_of_their_pages():
    """Every mean with its interval, in a row of the tables of what the papers say, stands in a table of what the row links
    to."""
    rows = [line for line in (RESULTS / "README.md").read_text().splitlines() if line.count("|") == 5]
    checked, pages, missing = 0, [], []
    for claim, seen, _, where in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows):
        assert where == "the same" or "](" in where or claim.strip("*").endswith(("say", "says")) or set(claim) == {"-"}, claim
        pages = [RESULTS / path for path in re.findall(r"\]\(([^)#]+)", where)] or pages
        in_tables = figures("\n".join(map(tables_of, pages)))
        checked += len(figures(seen))
        missing += [figure.text for figure in figures(seen) if not is_among(figure, in_tables)]
    assert not missing
    print(f"{checked} figures")
    assert checked > 60
