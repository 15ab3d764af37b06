#!/usr/bin/env python3
"""Writes runs' logs for Weights & Biases, as they grow with --follow: every number of the log is a curve, settings are the
run's config, samples are media.

W&B works offline, unless WANDB_MODE says otherwise: the data lies in RUN/wandb until `wandb sync RUN/wandb/offline-run-*`
uploads it. RUN/wandb/sent.json keeps what has been written, and the same command goes on from there. W&B can't take a step
back: where a resumed run takes steps again, the first values stay. Needs the package wandb: .venv/bin/pip install wandb
"""

import html
import json
import os
import secrets
import shlex

from follow import follow, follow_parser, needs, parse, scalars
from logs import InputError, main_of, options_of, tags_of, write_whole
from runner import lock_directory

PROG = "log_to_wandb.py"


class Wandb:
    """Writes a run's events with W&B, those that sent.json doesn't have."""

    def __init__(self, directory, project):
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            import wandb
        except ImportError:
            raise needs("wandb") from None
        self.wandb, self.directory, self.project = wandb, directory / "wandb", project
        self.run, self.config = None, {}
        self.directory.mkdir(exist_ok=True)
        self.lock = lock_directory(self.directory)
        self.sent = self.read_sent()

    def read_sent(self):
        """Returns the run's id, the rows that W&B has, and of each curve the last step."""
        path = self.directory / "sent.json"
        if not path.exists():
            return {"id": secrets.token_hex(4), "rows": 0, "steps": {}}
        try:
            sent = json.loads(path.read_text())
            return {"id": str(sent["id"]), "rows": int(sent["rows"]), "steps": dict(sent["steps"])}
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path} isn't what {PROG} writes: remove it to write the run anew") from None

    def send(self, events, times, anew):
        configs = [event for event in events if event["event"] == "config"]
        self.config = configs[-1] if configs else self.config
        rows = {}  # by step
        for event in events:
            for name, value in self.values_of(event).items():
                self.add(rows, event.get("step", 0), name, value)
        if not rows:
            return
        run = self.open()
        run.config.update({name: value for name, value in self.config.items() if name != "event"}, allow_val_change=True)
        for step, row in rows.items():
            run.log({"step": step, **row}, step=self.sent["rows"])
            self.sent["rows"] += 1
        write_whole(self.directory / "sent.json", json.dumps(self.sent))

    def values_of(self, event):
        sample = {"sample": event["text"]} if event["event"] == "sample" and "text" in event else {}
        return scalars(event) | sample

    def add(self, rows, step, name, value):
        """Puts a value into its step's row, unless W&B has that step of the curve."""
        if step <= self.sent["steps"].get(name, -1):
            return
        self.sent["steps"][name] = step
        text = isinstance(value, str)
        rows.setdefault(step, {})[name] = self.wandb.Html(f"<pre>{html.escape(value)}</pre>") if text else value

    def open(self):
        """Returns W&B's run; a later start goes on with it."""
        if self.run:
            return self.run
        options = options_of(self.config)
        settings = self.wandb.Settings(console="off", x_disable_stats=True)  # this machine's load isn't the run's
        try:
            self.run = self.wandb.init(
                project=self.project,
                id=self.sent["id"],
                name=options.get("run-name") or self.directory.parent.name,
                tags=tags_of(options),
                dir=self.directory.parent,
                resume="allow",
                reinit="create_new",
                settings=settings,
            )
        except (self.wandb.Error, ValueError) as e:  # a name or a tag that W&B can't take
            raise InputError(f"wandb: {e}") from None
        self.run.define_metric("*", step_metric="step")
        return self.run

    def close(self):
        if self.run:
            self.run.finish()


def main(arguments):
    parser = follow_parser(PROG, __doc__)
    parser.add_argument(
        "--project", default="train_gpt_mxfp8", metavar="NAME", help="W&B's project (default: %(default)s)"
    )
    options, directories = parse(parser, arguments, "wandb")
    follow(options, [Wandb(directory, options.project) for directory in directories])
    print(".venv/bin/wandb sync " + " ".join(f"{shlex.quote(str(directory))}/wandb/offline-run-*" for directory in directories))


if __name__ == "__main__":
    main_of(PROG, main)
