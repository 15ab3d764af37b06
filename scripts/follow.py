"""Reads the logs of runs as they grow, and hands their events to another program's writer: what log_to_tensorboard.py and
log_to_wandb.py share.
"""

import argparse
import importlib.util
import json
import os
import signal
import time

from logs import InputError, Parser, Stopped, event_of, log_of, number, read_events

IDENTITY = ("event", "step", "task", "operand", "layer", "linear")  # what tells two events apart
SETTINGS = ("config", "recipe")  # events whose numbers are settings, not curves
TAKE_TIME = ("train", "val", "checkpoint")  # events whose `seconds` have passed since the one before


class Follower:
    """A log, of which poll() reads what is new. A resumed run cuts its log and goes on from there: the last line read
    isn't where it was, and all of the log is new."""

    def __init__(self, path):
        self.log = log_of(path)
        self.position, self.last_line, self.ended = 0, b"", False

    def poll(self):
        """Returns the events since the last call, and whether they are the log's from its start."""
        try:
            with open(self.log, "rb") as file:
                anew = self.position == 0 or not self.is_as_it_was(file)
                self.position = 0 if anew else self.position
                file.seek(self.position)
                data = file.read()
        except FileNotFoundError:
            return [], False
        whole = data[: data.rfind(b"\n") + 1]  # a line that is being written waits for the next call
        return self.events_of(whole), anew

    def is_as_it_was(self, file):
        file.seek(self.position - len(self.last_line))
        return file.read(len(self.last_line)) == self.last_line

    def events_of(self, text):
        lines = text.splitlines(keepends=True)
        self.position += len(text)
        self.last_line = lines[-1] if lines else self.last_line
        events = [event for event in map(event_of, lines) if event and isinstance(event.get("step", 0), int)]
        if events:
            self.ended = events[-1]["event"] == "end"
        # Of events that were logged twice the last one counts.
        return list({tuple(event.get(key) for key in IDENTITY): event for event in events}.values())

    def times(self, events):
        """Returns when the events were logged, in seconds since 1970: the newest when the log was last written to, the
        others so much earlier as what came after them took."""
        passed = [number(e.get("seconds")) if e["event"] in TAKE_TIME else 0 for e in events]
        now, times = os.path.getmtime(self.log), []
        for seconds in reversed(passed):
            times.append(now)
            now -= seconds if seconds >= 0 else 0
        return times[::-1]


def scalars(event):
    """Returns the event's numbers by name, such as train/loss or quant/clamped/fprop-x/0/qkv (operand, layer, linear). A
    loss or norm that wasn't finite is NaN."""
    if event["event"] in SETTINGS:
        return {}
    where = [str(event[key]) for key in IDENTITY[2:] if key in event]
    fields = {name: value for name, value in event.items() if name not in IDENTITY}
    if event.get("finite") is False:
        fields |= {name: float("nan") for name, value in fields.items() if value is None}
    return {"/".join([event["event"], *path, *where]): value for path, value in numbers_in(fields)}


def numbers_in(value):
    """Yields the path and the value of every number in an object of JSON, and in lists of objects; a list of numbers is no
    curve."""
    if isinstance(value, list):
        value = {str(i): inner for i, inner in enumerate(value) if isinstance(inner, dict)}
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from (((name, *path), found) for path, found in numbers_in(inner))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield (), float(value)


def text_of(event):
    """Returns the event's text, of settings or of a sample; None where it has none."""
    if event["event"] in SETTINGS:
        return json.dumps({name: value for name, value in event.items() if name not in IDENTITY}, indent=1)
    return event.get("text")


def stop(signal_number, _):
    raise Stopped(signal_number)


def follow(options, sinks):
    """Sends every run's events to its sink; with --follow until all runs have ended."""
    followers = [Follower(run) for run in options.runs]
    try:
        while True:
            for follower, sink in zip(followers, sinks):
                events, anew = follower.poll()
                if events:
                    sink.send(events, follower.times(events), anew)
            if not options.follow or all(follower.ended for follower in followers):
                return
            time.sleep(options.every)
    finally:
        for sink in sinks:
            sink.close()


def follow_parser(prog, description):
    parser = Parser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's --out-dir, or its log.jsonl")
    parser.add_argument("--follow", action="store_true",
                        help="wait until all runs have begun, and go on as their logs grow, until all have ended")
    parser.add_argument("--every", type=float, default=10, metavar="SECONDS",
                        help="with --follow: between two looks (default: %(default)s)")
    return parser


def has_begun(run):
    log = log_of(run)
    return log.is_file() and log.stat().st_size > 0


def parse(parser, arguments, package):
    """Returns the options, and of each run the directory that its log lies in; with --follow once all runs have begun, for
    which it doesn't wait without the package."""
    options = parser.parse_args(arguments)
    if not 0.1 <= options.every <= 86400:
        raise InputError(f"--every {options.every:g}: give seconds, from 0.1 to a day")
    if options.follow and not importlib.util.find_spec(package):
        raise needs(package)
    signal.signal(signal.SIGTERM, stop)
    while options.follow and not all(map(has_begun, options.runs)):
        time.sleep(options.every)
    for run in options.runs:
        read_events(log_of(run))  # what is no log is refused before anything is written
    directories = [log_of(run).resolve().parent for run in options.runs]
    if len(set(directories)) < len(directories):
        raise InputError("a run is named twice: name each once")
    return options, directories


def needs(package):
    """Returns what is said where a package that isn't installed is needed."""
    return InputError(f"it needs the package {package}: .venv/bin/pip install {package}")
