"""Document lengths for benchmarks, in rows: real ones from bench/lengths, cut to a number of rows."""

import csv
import itertools
import pathlib
import random
import re

FOLDER = pathlib.Path(__file__).parent / "lengths"
BYTES_PER_TOKEN = 4
FILES = {"gsm8k": "gsm8k_test.txt", "book": "rust_book_chapters.txt", "code": "automodel_python_files.txt"}
NAMES = ("gsm8k", "book", "code", "long", "pretraining")


def from_file(name):
    for line in (FOLDER / FILES[name]).read_text().split():
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


def lengths(name, rows):
    """Lengths that add up to `rows`; the last document is cut."""
    source = {"long": lambda: itertools.repeat(8192), "pretraining": from_histogram}.get(name, lambda: from_file(name))
    taken = []
    for length in source():
        taken.append(min(length, rows - sum(taken)))
        if sum(taken) == rows:
            break
    return taken


def pairs(documents):
    """(q, k) pairs that causal attention inside documents looks at."""
    return sum(n * (n + 1) // 2 for n in documents)
