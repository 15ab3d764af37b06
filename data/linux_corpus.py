#!/usr/bin/env python3
"""A corpus of program text: the Linux kernel's source as Debian packages it, about a gigabyte of C, headers, assembler,
device trees, scripts and documentation. Each source file is a document; a tokenizer is trained on them.

apt-get downloads the package, and checks it by its signed index. It is read as an archive, in a stream, and neither
installed nor unpacked. What apt offers changes with time: source.json, beside the tokens, says which version it was.
"""

import contextlib
import json
import lzma
import os
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

from documents import Piece
from download import sha256
from prepare import Parser, add_output_options, check_output_options, prepare, print_summary, run, split_val
from token_files import InputError

PACKAGE = "linux-source-6.1|linux-source-6.12"  # of Debian 12 | 13
SUFFIXES = set(".c .h .S .s .rst .txt .dts .dtsi .dtso .yaml .py .pl .sh .awk .cocci .rs .lds .ld .y .l".split())
NAMES = re.compile(r"(Kconfig|Makefile|Kbuild|README|MAINTAINERS|CREDITS)(\..*)?")
# Three tenths of the text would be these tables of register addresses, which a machine wrote.
MACHINE_MADE = "drivers/gpu/drm/amd/include/"
WITH_COPY = "pass a copy of its .deb with --from-file and --sha256"
AR_MAGIC = b"!<arch>\n"
AR_HEADER = 60


def main(arguments):
    parser = Parser(prog="linux_corpus.py", description=__doc__)
    parser.add_argument("--from-file", metavar="PATH", help="a local .deb of the package instead of a download")
    parser.add_argument(
        "--sha256", metavar="HEX", help="of --from-file, where apt's index doesn't have that version (any longer)"
    )
    parser.add_argument(
        "--package", default=PACKAGE, metavar="NAME", help="a Debian package with kernel sources; of A|B the first that there is (default: %(default)s)"
    )
    add_output_options(parser, tokenizer="train:16384", val_fraction=0.01)
    options = parser.parse_args(arguments)
    check_output_options(options)
    if options.sha256 and not options.from_file:
        parser.error("--sha256 belongs to --from-file")
    if options.from_file:
        check_deb(Path(options.from_file), options.package, options.sha256)
        prepare_corpus(Path(options.from_file), options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        prepare_corpus(downloaded_deb(options.package, scratch, "--package", WITH_COPY), options)


def prepare_corpus(deb, options):
    corpus = Corpus(deb)
    summary = prepare(split_val(corpus.pieces, options.val_fraction), options, corpus.description)
    print(
        f"{corpus.control['Package']} {corpus.control['Version']}: {corpus.documents:,} documents, "
        f"{corpus.text_bytes / 1e6:,.1f} MB of text"
    )
    print_summary(summary, options.out_dir)


class Corpus:
    """The documents of a package of kernel sources, with counts of the last time they were gone through."""

    def __init__(self, deb):
        self.deb = deb
        self.control = read_control(deb)
        self.documents = self.text_bytes = self.not_utf8 = 0

    def pieces(self):
        self.documents = self.text_bytes = self.not_utf8 = 0
        for data in source_files(self.deb):
            try:
                text = data.decode()
            except UnicodeDecodeError:
                self.not_utf8 += 1
                continue
            if text.strip():
                self.documents += 1
                self.text_bytes += len(data)
                yield Piece(True, text)

    def description(self, summary):
        facts = {
            "package": self.control["Package"],
            "version": self.control["Version"],
            "deb_sha256": sha256(self.deb),
            "documents": self.documents,
            "text_bytes": self.text_bytes,
            "left_out_not_utf8": self.not_utf8,
            **summary._asdict(),
        }
        return {"source.json": (json.dumps(facts, indent=1) + "\n").encode()}


# ---------------------------------------------------------------------------------------------------------------------
# Getting the package


def package_of(deb):
    """The name of a package's file, as apt-get writes it, is PACKAGE_VERSION_ARCHITECTURE.deb."""
    return deb.name.split("_")[0]


def downloaded_deb(names, scratch, option, with_copy):
    """Downloads a package, of alternatives, A|B, the first that apt has, into an empty directory, and returns the file. Where
    that fails the message names the option that says which package, and what to do with a copy of it. apt-get takes a name
    also as a regular expression, and so another package than one of these."""
    names, reasons = names.split("|"), []
    # As root apt changes to a user of its own, who may not write here.
    as_root = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    for name in names:
        print(f"downloading {name} with apt-get", flush=True)
        result = apt("apt-get", *as_root, "download", name, cwd=scratch, with_copy=with_copy)
        debs = {package_of(deb): deb for deb in sorted(Path(scratch).glob("*.deb"))}
        found = next((debs[other] for other in names if other in debs), None)
        if result.returncode == 0 and found:
            return found
        said = f"it has {', '.join(debs)}" if debs else "it said nothing"
        errors = [line.removeprefix("E: ") for line in result.stderr.splitlines() if line.startswith("E: ")]
        reason = (errors or result.stderr.strip().splitlines()[-1:] or [said])[0]
        reasons.append(f"{name} ({reason})")
        for deb in debs.values():
            deb.unlink()
        if not debs and not re.search("Unable to locate|candidate", result.stderr):
            break  # a failure of the network, say, is no reason to take another package
    raise InputError(f"apt-get can't download {' or '.join(reasons)}: run apt-get update, choose one that it has with "
                     f"{option}, or {with_copy}")


def apt(*command, cwd=None, with_copy=WITH_COPY):
    try:
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C.UTF-8"})
    except FileNotFoundError:
        raise InputError(f"there is no {command[0]} on this system: {with_copy}") from None


def check_deb(path, package, expected):
    if not path.is_file():
        raise InputError(f"there is no file {path}: leave --from-file out to download the package")
    known = [expected.lower()] if expected else index_checksums(package)
    package = package.replace("|", " or ")
    if not known:
        raise InputError(f"apt's index has no {package} to check {path} by: run apt-get update, or pass --sha256")
    if sha256(path) not in known:
        by = "--sha256" if expected else f"apt's index of {package} (an older version? pass its --sha256)"
        raise InputError(f"the SHA-256 of {path} isn't that of {by}: get a whole copy")


def index_checksums(package):
    return re.findall(r"^SHA256: ([0-9a-f]{64})$", apt("apt-cache", "show", *package.split("|")).stdout, re.MULTILINE)


# ---------------------------------------------------------------------------------------------------------------------
# Reading it: an ar archive of tar archives, of which one holds the sources as a tar archive


class Part:
    """The next `size` bytes of an open file, as a file that is read once from start to end."""

    def __init__(self, file, size):
        self.file, self.left = file, size

    def read(self, size=-1):
        data = self.file.read(self.left if size < 0 else min(size, self.left))
        self.left -= len(data)
        return data


def open_member(file, name, path):
    """A stream of the tar archive `name` in the open .deb, whatever way it is compressed; (Debian policy, deb(5))."""
    file.seek(0)
    if file.read(len(AR_MAGIC)) != AR_MAGIC:
        raise InputError(f"{path} is not a Debian package (an ar archive): get a whole copy")
    while len(header := file.read(AR_HEADER)) == AR_HEADER and header[48:58].strip().isdigit():
        size = int(header[48:58])
        if header[:16].decode("latin-1").rstrip().rstrip("/") == f"{name}.xz":
            return tarfile.open(fileobj=lzma.open(Part(file, size)), mode="r|")
        file.seek(size + size % 2, os.SEEK_CUR)
    raise InputError(f"{path} has no {name}.xz: it is not a Debian package, or "
                     "compressed another way, as Ubuntu's are: take Debian's, or other text (data/README.md)")


@contextlib.contextmanager
def reading(path):
    """Makes one sentence of what a broken archive raises."""
    try:
        yield
    except (lzma.LZMAError, EOFError, tarfile.TarError):
        raise InputError(f"{path} ends early or is damaged: get a whole copy") from None


def files_of(path, archive="data.tar"):
    """Name and open file of each regular file of a .deb's archive, in its order."""
    with reading(path), open(path, "rb") as file, open_member(file, archive, path) as members:
        for member in members:
            if member.isfile():
                yield member.name.removeprefix("./"), members.extractfile(member)


def read_control(path):
    with reading(path):
        for name, file in files_of(path, "control.tar"):
            if name == "control":
                control = dict(re.findall(r"^(Package|Version): (.+)$", file.read().decode(), re.MULTILINE))
                if len(control) == 2:
                    return control
    raise InputError(f"{path} doesn't say which package it is: get a whole copy")


def source_files(path):
    """The bytes of each source file, in the order of the archive."""
    found = False
    with reading(path):
        for name, file in files_of(path):
            if re.search(r"/usr/src/[^/]+\.tar\.xz$", "/" + name):
                found = True
                yield from wanted_files(file)
    if not found:
        raise InputError(f"{path} holds no sources (usr/src/*.tar.xz): pass a linux-source package")


def wanted_files(compressed):
    with lzma.open(compressed) as file, tarfile.open(fileobj=file, mode="r|") as sources:
        for member in sources:
            name = member.name.removeprefix("./").partition("/")[2]
            if member.isfile() and is_text(name) and not name.startswith(MACHINE_MADE):
                yield sources.extractfile(member).read()


def is_text(name):
    last = name.rpartition("/")[2]
    return os.path.splitext(last)[1] in SUFFIXES or NAMES.fullmatch(last) is not None


if __name__ == "__main__":
    run(main)
