"""The log of a run, as every script here reads it, and what all of them answer bad input with."""

import argparse
import fcntl
import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np

NOT_FINITE = "not-finite"
DIVERGED = (NOT_FINITE, "diverged")  # the second is the proxy's
# Of a run that wasn't stopped by a signal.
ENDS = ("max-steps", "max-tokens", "max-minutes", "epoch", "epochs", "steps", *DIVERGED)
# What a recipe can be adjusted by: the group Recipe in the --help of train_gpt_mxfp8, but for --recipe itself.
ADJUSTMENTS = (
    "format-weights",
    "format-activations",
    "format-gradients",
    "format-gains",
    "operand",
    "operand-in",
    "scale-rounding",
    "scale-rounding-weights",
    "scale-rounding-activations",
    "scale-rounding-gradients",
    "element-rounding",
    "element-rounding-weights",
    "element-rounding-activations",
    "element-rounding-gradients",
    "hadamard-fprop",
    "hadamard-dgrad",
    "hadamard-wgrad",
    "hadamard-size",
    "backward-source",
    "amax-history",
    "amax-algorithm",
    "amax-margin",
    "bf16-first-layers",
    "bf16-last-layers",
    "weight-scaling",
    "quantize-ln-affine",
    "quantize-lm-head",
    "recipe-at",
)
SHOWN_ADJUSTMENTS = 3  # a recipe with more is called by one fewer, and by how many more there are


class InputError(Exception):
    """What a user can cause: one sentence that names the thing and the remedy."""


class Stopped(Exception):
    """By a signal; its number."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        takes_more = "unrecognized" in message and "-- OPTIONS" in self.format_usage()
        hint = "; options of train_gpt_mxfp8 follow after --" if takes_more else ""
        raise InputError(f"{message}{hint}; --help lists the options")


def main_of(name, main):
    """Calls main(arguments); what the user can cause becomes one sentence and an exit code."""
    try:
        try:
            main(sys.argv[1:])
        finally:
            if sys.stdout:  # not with >&-
                sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (Stopped, KeyboardInterrupt) as e:
        print(f"{name}: stopped; the same command goes on with what isn't done", file=sys.stderr)
        sys.exit(128 + (e.args[0] if isinstance(e, Stopped) else signal.SIGINT))
    except (InputError, OSError, UnicodeError) as e:
        sentence = f"{e.filename}: {e.strerror}" if isinstance(e, OSError) and e.filename else str(e)
        if isinstance(e, UnicodeError):
            sentence = f"a name or a text isn't UTF-8 ({sentence}): choose another name"
        print(f"{name}: {' '.join(sentence.split())}", file=sys.stderr)
        sys.exit(2)


class Run:
    """One log: its events by kind, the last one of each step (a resumed run logs some steps twice)."""

    def __init__(self, path, label=None):
        self.log = log_of(path)
        events = read_events(self.log)
        configs = [e for e in events if e["event"] == "config"]
        self.train = by_step(events, "train")
        self.val = by_step(events, "val")
        self.quant = by_step(events, "quant", "layer", "linear", "operand")
        self.eval = by_step(events, "eval", "task")
        self.bias = by_step(events, "gradient_bias")
        self.recipes = recipes_in(events)
        self.config = configs[-1] if configs else {}
        self.end = events[-1] if events[-1]["event"] == "end" else None
        # A train event numbers its step from 0; the other events say how many steps were taken before them.
        counted = [e for kind in ("train", "val", "checkpoint", "end") for e in by_step(events, kind)]
        self.last_step = max((e["step"] for e in counted), default=0)
        options = options_of(self.config)
        self.name = str(options.get("run-name") or directory_name(self.log))
        self.tags = tags_of(options)
        self.given_label = label
        self.label = self.label_over(self.recipes)

    @property
    def state(self):
        """Returns what the run is doing: running, finished, stopped or diverged."""
        if is_locked(self.log):
            return "running"
        reason = self.end.get("reason") if self.end else None
        if reason in DIVERGED or not reason and self.train and self.train[-1].get("finite") is False:
            return "diverged"
        return "finished" if reason in ENDS else "stopped"

    def label_over(self, recipes):
        """Returns the label that was given, or the run's name and what that doesn't say of these recipes and its tags."""
        details = [detail for detail in (recipes_in_words(recipes), *self.tags) if detail and detail not in self.name]
        return self.given_label or (f"{self.name} ({', '.join(details)})" if details else self.name)

    def recipes_of(self, events):
        """Returns those of the run's recipes under which the events were."""
        ends = [*(step for step, _ in self.recipes[1:]), np.inf]
        return [r for r, end in zip(self.recipes, ends) if any(r[0] <= e["step"] < end for e in events)]

    def series(self, events, field):
        """Returns steps and values of a field; NaN where the log says null."""
        present = [e for e in events if field in e]
        return np.array([e["step"] for e in present], float), np.array([number(e[field]) for e in present], float)


def log_of(path):
    """Returns the log of a run's directory; a log itself is what it is."""
    return Path(path) / "log.jsonl" if Path(path).is_dir() else Path(path)


def newest_checkpoint(path):
    """Returns the directory of a run's newest checkpoint; of what is no run the path itself."""
    latest = Path(path) / "latest"
    return Path(path) / latest.read_text().strip() if latest.is_file() else Path(path)


def read_events(log):
    """Returns the log's events, as dictionaries, in the order in which they were written."""
    try:
        lines = log.read_bytes().splitlines()
    except OSError as e:
        raise InputError(f"can't read {log} ({e.strerror}): pass a run's --out-dir or its log.jsonl") from None
    events = [event for event in map(event_of, lines) if event]
    if not events:
        raise InputError(
            f"{log} is not a log of train_gpt_mxfp8: it should have a JSON object with an event on each line"
        )
    return events


def event_of(line):
    """Returns the event on a line; None for the line being written, or cut off when the machine
    stopped."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def by_step(events, kind, *keys):
    """Returns the events of a kind, by step: of those with one step and the same keys the last."""
    chosen = [e for e in events if e["event"] == kind and isinstance(e.get("step"), (int, float))]
    latest = {(e["step"], *(str(e.get(key)) for key in keys)): e for e in chosen}
    return sorted(latest.values(), key=lambda e: e["step"])


def plural(count):
    """Returns the end of a noun of which there are so many."""
    return "" if count == 1 else "s"


def number(value):
    return float(value) if isinstance(value, (int, float)) else np.nan


def is_locked(log):
    """Returns whether the program that writes the log runs. The lock is tried for a moment: only an
    open file that another has locked says so on every system."""
    with open(log, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass  # a file system without locks
    return False


def tags_of(options):
    """Returns the words of --tags, as a list."""
    return [tag.strip() for tag in str(options.get("tags") or "").split(",") if tag.strip()]


def options_of(config):
    """Returns the options of a config event; none where it isn't one of ours."""
    options = config.get("options")
    return options if isinstance(options, dict) else {}


def directory_name(log):
    return log.resolve().parent.name if log.name == "log.jsonl" else log.stem


def recipes_in(events):
    """Returns (step, name) of each recipe that the run had, from the step on. A start at an earlier step takes back what came
    after it."""
    recipes, config = [], {}
    for event in events:
        step = event.get("step", 0)
        if event["event"] not in ("config", "recipe") or not isinstance(step, (int, float)):
            continue
        config = event if event["event"] == "config" else config
        name = recipe_name(event, options_of(config))
        recipes = [recipe for recipe in recipes if recipe[0] < step]
        if name and (not recipes or recipes[-1][1] != name):
            recipes.append((step, name))
    return recipes


def recipes_in_words(recipes):
    """Returns such as `mxfp8, then bf16 from step 6`."""
    starts = (f" from step {step}" if i else "" for i, (step, _) in enumerate(recipes))
    return ", then ".join(shortened(name) + start for (_, name), start in zip(recipes, starts))


def recipe_name(event, options):
    """Returns what compare_recipes.py calls an event's recipe under a config's options, such as mxfp8+scale-rounding=ceil."""
    recipe = event.get("recipe")
    name, is_adjusted = (recipe.get("name"), recipe.get("adjusted")) if isinstance(recipe, dict) else (recipe, False)
    if not name or not is_adjusted:
        return str(name or "")
    adjustments = adjustments_at(event.get("step", 0), options)
    return "+".join([str(name), *adjustments]) if adjustments else f"{name}, adjusted"


def adjustments_at(step, options):
    """Returns what adjusts the recipe at a step: the last --recipe-at until then, such as 6:mxfp8,wgrad-x=bf16, or options."""
    switches = [re.fullmatch(r"(\d+):([^,]+),?(.*)", str(text)) for text in listed(options.get("recipe-at"))]
    past = [switch[3] for switch in switches if switch and int(switch[1]) <= step]
    if past:
        given = filter(None, past[-1].split(","))
        return [part if part.split("=")[0] in ADJUSTMENTS else f"operand={part}" for part in given]
    given = [(name, value) for name in ADJUSTMENTS if name != "recipe-at" for value in listed(options.get(name)) if value]
    return [name if value is True else f"{name}={value}" for name, value in given]


def listed(value):
    """Returns a value of an option that may be repeated, or not, as a list."""
    return value if isinstance(value, list) else [value]


def shortened(name):
    """Returns a recipe's name with its first adjustments, and how many more it has."""
    base, *adjustments = name.split("+")
    if len(adjustments) <= SHOWN_ADJUSTMENTS:
        return name
    shown = adjustments[: SHOWN_ADJUSTMENTS - 1]
    return f"{'+'.join([base, *shown])} + {len(adjustments) - len(shown)} more"


def write_whole(path, content):
    """Replaces a file whole or not at all; makes its directory."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
