#!/usr/bin/env python3
"""Writes runs' logs for TensorBoard, as they grow with --follow: every number of the log is a curve, settings and samples
are texts.

Each run's events are a file in its directory, so that `tensorboard --logdir runs` shows all of them. The file is made from
the log at every start, in place of the one before: nothing counts twice, not in a resumed run either. Needs the package
tensorboard: .venv/bin/pip install tensorboard
"""

import os
import shlex

from follow import follow, follow_parser, needs, parse, scalars, text_of
from logs import main_of
from runner import lock_directory

PROG = "log_to_tensorboard.py"
SUFFIX = ".train_gpt_mxfp8"  # of the files that are this script's


class TensorBoard:
    """Writes a run's events to a file in a directory."""

    def __init__(self, directory):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.plugins.text.summary_v2 import text_pb
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise needs("tensorboard") from None
        self.Event, self.SessionLog, self.Summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2.Summary
        self.text_pb, self.make_writer = text_pb, EventFileWriter
        self.directory, self.writer = directory, None

    def send(self, events, times, anew):
        if anew:
            self.begin()
        for event, time in zip(events, times):
            values = [self.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(event).items()]
            text = text_of(event)
            if text is not None:
                values += self.text_pb(event["event"], as_code(text)).value
            if values:
                self.writer.add_event(self.Event(wall_time=time, step=event.get("step", 0), summary={"value": values}))
        self.writer.flush()

    def begin(self):
        """Begins a file, in place of an earlier one's, or makes readers of the one that is open forget what came before."""
        if not self.writer:
            self.lock = lock_directory(self.directory)
            for old in self.directory.glob(f"events.out.tfevents.*{SUFFIX}"):
                old.unlink()
            self.writer = self.make_writer(str(self.directory), filename_suffix=SUFFIX)
        self.writer.add_event(self.Event(step=0, session_log=self.SessionLog(status=self.SessionLog.START)))

    def close(self):
        if self.writer:
            self.writer.close()


def as_code(text):
    """Returns Markdown that shows the text as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def where(directories):
    """Returns the option that names the runs: by the directory that holds them, or each where that holds no run itself."""
    paths = [os.path.abspath(directory) for directory in directories]
    common = os.path.commonpath(paths)
    if len(paths) == 1 or common in map(os.path.dirname, paths):
        return f"--logdir {shlex.quote(os.path.commonpath(directories))}"
    return "--logdir_spec " + shlex.quote(",".join(f"{path.strip('/').replace('/', '-')}:{path}" for path in paths))


def main(arguments):
    options, directories = parse(follow_parser(PROG, __doc__), arguments, "tensorboard")
    follow(options, [TensorBoard(directory) for directory in directories])
    print(f".venv/bin/tensorboard {where(directories)}")


if __name__ == "__main__":
    main_of(PROG, main)
