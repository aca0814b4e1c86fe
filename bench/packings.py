"""Document lengths for benchmarks, in rows: real ones from bench/lengths, cut to a number of rows."""

import csv
import itertools
import pathlib
import random
import re

FOLDER = pathlib.Path(__file__).parent / "lengths"
BYTES_PER_TOKEN = 4
FILES = {"gsm8k": "gsm8k_test.txt", "book": "rust_book_chapters.txt", "code": "automodel_python_files.txt"}
NAMES = ("long", "one", "book", "code", "gsm8k", "pretraining")
LONG = 8192


def from_file(name):
    """Endless: the documents in their order, again and again."""
    for line in itertools.cycle((FOLDER / FILES[name]).read_text().split()):
        yield -(-int(line) // BYTES_PER_TOKEN)


def from_histogram(seed=0):
    """Endless: a bin by its share of documents, a length evenly inside it. Token counts, so nothing is divided."""
    with open(FOLDER / "pretraining_histogram.csv", newline="") as file:
        rows = [(re.findall(r"\d+", row["range"]), int(row["number"])) for row in csv.DictReader(file)]
    bins, weights = zip(*rows)
    sampler = random.Random(seed)
    while True:
        low, high = map(int, sampler.choices(bins, weights)[0])
        yield max(1, sampler.randint(low, high))


def source(name, rows):
    if name in FILES:
        return from_file(name)
    return from_histogram() if name == "pretraining" else itertools.repeat({"long": LONG, "one": rows}[name])


def lengths(name, rows):
    """Lengths that add up to `rows`; the last document is cut."""
    taken, left = [], rows
    for length in source(name, rows):
        taken.append(min(length, left))
        left -= taken[-1]
        if not left:
            return taken


def pairs(documents, window=None):
    """(q, k) pairs that causal attention inside documents looks at; row i of one sees min(i + 1, window) keys."""
    return sum(below_diagonal(n) - below_diagonal(n - window if window and window < n else 0) for n in documents)


def below_diagonal(n):
    return n * (n + 1) // 2
