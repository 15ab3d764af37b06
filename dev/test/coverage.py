"""Line coverage of llmc/ by the tests: a table, then the lines that no test reaches. usage: coverage.py BUILD_DIR

BUILD_DIR was built with --coverage and the tests have been run in it: every program left its counts beside its objects.
A line counts as reached where any program reached it. Programs that tests kill (SIGKILL) leave no counts.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def line_counts(build):
    """Returns {file: {line number: times executed}} over all programs."""
    counts = defaultdict(lambda: defaultdict(int))
    for data in sorted(build.rglob("*.gcda")):
        done = subprocess.run(["gcov", "--json-format", "--stdout", str(data)], cwd=ROOT, capture_output=True, check=True)
        for text in done.stdout.splitlines():
            for file in json.loads(text)["files"]:
                path = (ROOT / file["file"]).resolve()
                if ROOT / "llmc" not in path.parents and path.parent != ROOT:
                    continue
                for line in file["lines"]:
                    counts[str(path.relative_to(ROOT))][line["line_number"]] += line["count"]
    return counts


def main():
    counts = line_counts(Path(sys.argv[1]).resolve())
    if not counts:
        sys.exit(f"no .gcda files in {sys.argv[1]}: make coverage builds and runs the tests first")
    total = reached_total = 0
    for file, lines in sorted(counts.items()):
        reached = sum(count > 0 for count in lines.values())
        total, reached_total = total + len(lines), reached_total + reached
        print(f"{file:34} {reached:5} of {len(lines):5} lines  {100 * reached / len(lines):6.1f} %")
    print(f"{'in all':34} {reached_total:5} of {total:5} lines  {100 * reached_total / total:6.1f} %")
    print("\nreached by no test:")
    for file, lines in sorted(counts.items()):
        source = (ROOT / file).read_text().splitlines()
        for number in sorted(number for number, count in lines.items() if count == 0):
            print(f"{file}:{number}: {source[number - 1].strip()}")


if __name__ == "__main__":
    main()
