#!/usr/bin/env python3
"""A corpus of English prose: what Debian's documentation packages say in sentences, without markup, program text and
what was said before. Each page is a document; a tokenizer is trained on them.

apt-get downloads the packages into a cache directory, checked by its signed index; what is taken of each is kept there
too, so that a call that was stopped goes on. Each package's copyright file is put beside the tokens: these are its
licences. What apt offers changes with time: source.json says which versions they were.
"""

import gzip
import hashlib
import html.parser
import json
import os
import re
import tempfile
import zlib
from pathlib import Path

from documents import json_lines, row_pieces
from download import sha256
from linux_corpus import downloaded_deb, files_of, package_of, read_control
from prepare import Parser, add_output_options, check_output_options, prepare, print_summary, run, split_val
from token_files import InputError

PACKAGES = (  # of Debian 12 | 13
    "openjdk-17-doc|openjdk-21-doc linux-doc-6.1|linux-doc-6.12 rust-web-doc python3.11-doc|python3.13-doc gnome-user-docs "
    "postgresql-doc-15|postgresql-doc-17 cppreference-doc-en-html libreoffice-help-en-us python-sympy-doc dict-gcide "
    "debian-handbook dict-wn qtbase5-doc-html erlang-doc racket-doc"
).split()
PROSE = set("p div li dd blockquote h1 h2 h3 h4 title caption td".split())  # elements whose text is prose
SKIPPED = set("script style pre nav code-block footer svg table-of-contents screen programlisting".split())
INLINE = set("a abbr b bdi bdo big cite code data del dfn em font i ins kbd label mark q s samp small span strike strong sub sup "
             "time tt u var wbr app cmd file gui guiseq input key keyseq link output sys".split())
SUFFIXES = (".html", ".htm", ".xhtml", ".page", ".txt", ".dict.dz")
FEWEST_WORDS = 5  # of a sentence
SHORTEST = 200  # characters of a document
# Of English text these are a tenth or more of the words, of other languages' fewer.
COMMON = set("the of and to is".split())
FEWEST_COMMON = 0.08
INVALID = "\ufffd"
MOST_INVALID = 0.01  # of a page's characters: bytes that aren't UTF-8


def main(arguments):
    parser = Parser(prog="debian_docs.py", description=__doc__)
    parser.add_argument("--packages", metavar="NAME,...", default=",".join(PACKAGES),
                        help="Debian packages with documentation; of A|B the first that there is (default: %(default)s)")
    parser.add_argument("--cache-dir", metavar="DIR", default="build/debian-docs-cache", type=Path,
                        help="for packages, NAME.deb, and what is taken of them (default: %(default)s)")
    add_output_options(parser, tokenizer="train:16384", val_fraction=0.01)
    options = parser.parse_args(arguments)
    check_output_options(options)
    packages = [name for name in options.packages.split(",") if name]
    if not packages:
        parser.error("--packages names none")
    options.cache_dir.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(packages, options.cache_dir)
    summary = prepare(split_val(corpus.pieces, options.val_fraction), options, corpus.description)
    print(f"{len(packages)} packages: {corpus.documents:,} documents, {corpus.text_bytes / 1e6:,.1f} MB of text")
    print_summary(summary, options.out_dir)


class Corpus:
    """The documents of some packages, of which no sentence is there twice."""

    def __init__(self, packages, cache):
        self.debs = [cached_deb(name, cache) for name in packages]
        self.pages = [cached_pages(deb) for deb in self.debs]
        self.documents = self.text_bytes = 0

    def pieces(self):
        self.documents = self.text_bytes = 0
        said = set()
        for page in (page for path in self.pages for page in json_lines(path, "text")):
            text = without_repeats(page, said)
            if len(text) >= SHORTEST:
                self.documents += 1
                self.text_bytes += len(text.encode())
                yield from row_pieces([text])

    def description(self, summary):
        controls = [read_control(deb) for deb in self.debs]
        facts = {
            "packages": [{"package": c["Package"], "version": c["Version"], "deb_sha256": sha256(deb)}
                         for c, deb in zip(controls, self.debs)],
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            **summary._asdict(),
        }
        licences = {f"copyright-{c['Package']}.txt": copyright_of(deb) for c, deb in zip(controls, self.debs)}
        return {"source.json": (json.dumps(facts, indent=1) + "\n").encode(), **licences}


# ---------------------------------------------------------------------------------------------------------------------
# Packages


def cached_deb(names, cache):
    """A package's file in the cache, downloaded where it isn't there; of alternatives, A|B, the first that there is."""
    paths = [cache / f"{name}.deb" for name in names.split("|")]
    there = next((path for path in paths if path.is_file()), None)
    if there:
        return there
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        deb = downloaded_deb(names, scratch, "--packages", f"put a copy of its .deb there as {' or '.join(map(str, paths))}")
        return deb.rename(cache / f"{package_of(deb)}.deb")


def copyright_of(deb):
    for name, file in files_of(deb):
        if re.fullmatch(r"usr/share/doc/[^/]+/copyright", name):
            return file.read()
    raise InputError(f"{deb} has no copyright file, and so no licence: leave the package out of --packages")


def cached_pages(deb):
    """A file of JSON lines with the prose of each page of a package, made where it isn't there or is older than the package's
    file. When that came here its ctime says: its mtime is the server's."""
    path = deb.with_suffix(".jsonl")
    if path.is_file() and path.stat().st_mtime_ns >= deb.stat().st_ctime_ns:
        return path
    print(f"reading {deb.stem}", end="", flush=True)
    temporary, count = path.with_suffix(".tmp"), 0
    with open(temporary, "w") as out:
        for name, file in files_of(deb):
            text = prose_of(name.removesuffix(".gz"), file, name.endswith(".gz"))
            if is_english(text):
                out.write(json.dumps({"text": text}) + "\n")
                count += 1
        out.flush()
        os.fsync(out.fileno())
    print(f": {count:,} pages")
    if count == 0:
        temporary.unlink()
        raise InputError(f"{deb} has no page of English prose: leave the package out of --packages")
    temporary.rename(path)
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Prose


def prose_of(name, file, compressed):
    """The paragraphs of a page, a line each; nothing of what is no page, or in another encoding than UTF-8."""
    if not name.endswith(SUFFIXES) or re.search(r"copyright|changelog", name):
        return ""
    data = file.read()
    try:
        text = (gzip.decompress(data) if compressed or name.endswith(".dz") else data).decode(errors="replace")
    except (OSError, EOFError, zlib.error):
        return ""
    if text.count(INVALID) > MOST_INVALID * len(text):
        return ""
    if name.endswith((".txt", ".dz")):
        return "\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    page = Page()
    page.feed(text)
    return "\n".join(page.paragraphs)


class Page(html.parser.HTMLParser):
    """The text of the elements that hold prose, of HTML or of GNOME's Mallard."""

    def __init__(self):
        super().__init__()
        self.paragraphs, self.open, self.text, self.skipping = [], 0, [], 0

    def handle_starttag(self, tag, attributes):
        self.end_word(tag)
        self.skipping += tag in SKIPPED
        if tag in PROSE:
            self.end_paragraph()
            self.open += 1

    def handle_endtag(self, tag):
        self.end_word(tag)
        self.skipping -= tag in SKIPPED and self.skipping > 0
        if tag in PROSE:
            self.end_paragraph()
            self.open -= self.open > 0

    def handle_data(self, data):
        if self.open and not self.skipping:
            self.text.append(data)

    def end_word(self, tag):
        """Parts the texts on both sides of a tag, such as <br>, that isn't one within words."""
        if tag not in INLINE:
            self.text.append(" ")

    def end_paragraph(self):
        paragraph = " ".join("".join(self.text).split())
        self.text = []
        if paragraph:
            self.paragraphs.append(paragraph)


def is_english(text):
    words = text.lower().split()
    return bool(words) and sum(word in COMMON for word in words) >= FEWEST_COMMON * len(words)


def without_repeats(page, said):
    """The page's paragraphs with those sentences that weren't said before; adds them to `said`."""
    paragraphs = []
    for line in page.split("\n"):
        fresh = [sentence for sentence in re.split(r"(?<=[.!?])\s+", line) if is_fresh(sentence, said)]
        if fresh:
            paragraphs.append(" ".join(fresh))
    return "\n\n".join(paragraphs)


def is_fresh(sentence, said):
    """Whether it is a sentence, of words rather than symbols, that wasn't said before."""
    letters = sum(c.isascii() and (c.isalpha() or c == " ") for c in sentence)
    if len(sentence.split()) < FEWEST_WORDS or letters < 0.8 * len(sentence) or INVALID in sentence:
        return False
    key = hashlib.blake2b(sentence.encode(), digest_size=8).digest()
    fresh = key not in said
    said.add(key)
    return fresh


if __name__ == "__main__":
    run(main)
