"""Reports of experiments: one HTML file with its pictures inside, the same as Markdown, and where it all was made."""

import base64
import html
import io
import os
import platform
import subprocess
import textwrap

from logs import write_whole
from runner import ROOT

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; }
img { max-width: 100%; }
pre { background: #f6f6f6; padding: .6rem .8rem; overflow-x: auto; font-size: 12.5px; }
"""


def wrapped(text, mark=""):
    """A paragraph, or an item of a list, in lines of 100 columns, which is how all pages here are kept."""
    return textwrap.fill(mark + text, 100, subsequent_indent=" " * len(mark), break_long_words=False,
                         break_on_hyphens=False)


def markdown_table(head, rows):
    """Returns a table, whose columns `head` names; one that ends in a colon holds numbers, to the
    right."""
    right = [name.endswith(":") for name in head]
    lines = [[name.removesuffix(":") for name in head], ["---:" if r else "---" for r in right], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def html_table(head, rows):
    right = [name.endswith(":") for name in head]

    def line(cells, tag):
        texts = [html.escape(cell.removesuffix(":") if tag == "th" else cell) for cell in cells]
        marked = [f"<{tag}{' class=number' if r else ''}>{t}</{tag}>" for r, t in zip(right, texts)]
        return "<tr>" + "".join(marked) + "</tr>"

    return "<table>\n" + "\n".join([line(head, "th"), *(line(row, "td") for row in rows)]) + "\n</table>"


def print_table(head, rows):
    """Prints a table for a terminal, with a head as markdown_table() takes it."""
    lines = [[name.removesuffix(":") for name in head], *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = [cell.rjust(w) if name.endswith(":") else cell.ljust(w) for name, cell, w in zip(head, line, widths)]
        print("  ".join(cells).rstrip())


class Report:
    """Headings, paragraphs, tables, pictures and commands, in order, for both files."""

    def __init__(self, title):
        self.title = title
        self.html, self.markdown, self.pictures = [f"<h1>{html.escape(title)}</h1>"], [f"# {title}"], {}

    def heading(self, text):
        self.html.append(f"<h2>{html.escape(text)}</h2>")
        self.markdown.append(f"## {text}")

    def paragraph(self, text):
        self.html.append(f"<p>{html.escape(text)}</p>")
        self.markdown.append(wrapped(text))

    def items(self, texts):
        self.html.append("<ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in texts) + "</ul>")
        self.markdown.append("\n".join(wrapped(text, "- ") for text in texts))

    def table(self, head, rows):
        self.html.append(html_table(head, rows))
        self.markdown.append(markdown_table(head, rows).rstrip("\n"))

    def picture(self, figure, name, words):
        import matplotlib.pyplot as plt

        png = io.BytesIO()
        figure.savefig(png, format="png")
        plt.close(figure)
        self.pictures[f"{name}.png"] = png.getvalue()
        data = base64.b64encode(png.getvalue()).decode()
        self.html.append(f'<p><img alt="{html.escape(words)}" src="data:image/png;base64,{data}"></p>')
        self.markdown.append(f"![{words}]({name}.png)")

    def code(self, lines):
        self.html.append("<pre>" + html.escape("\n".join(lines)) + "</pre>")
        self.markdown.append("\n".join(["```", *lines, "```"]))

    def made_by(self, command, jobs, device, which="which ran"):
        """Adds how to make it again: this program's command, those of runs, `which` they are, the
        commit, the machine. Logs don't tell theirs."""
        self.heading("How it was made")
        self.items([
                f"report drawn at commit {commit()}; runs done before may be of another one",
                f"report drawn on this machine: {machine()}",
                f"trained on: {device}",
            ])
        self.code([command])
        self.paragraph(which)
        self.code(jobs)

    def write(self, out_dir):
        for name, png in self.pictures.items():
            write_whole(out_dir / name, png)
        body = "\n".join(self.html)
        head = f"<meta charset=utf-8>\n<title>{html.escape(self.title)}</title>\n<style>{CSS}</style>"
        write_whole(out_dir / "report.md", "\n\n".join(self.markdown) + "\n")
        write_whole(out_dir / "report.html", f"<!DOCTYPE html>\n<html lang=en>\n{head}\n{body}\n</html>\n")


def commit():
    def git(*arguments):
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)

    try:
        head = git("rev-parse", "--short=12", "HEAD")
    except FileNotFoundError:
        head = None
    if head is None or head.returncode != 0:
        return "not known: this is no clone of the repository"
    changed = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
    return head.stdout.strip() + (", with changes that aren't committed" if changed else "")


def machine():
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    )
