"""Real documents: the source files of Python's standard library as bytes, packed into sequences."""

import itertools
import pathlib
import random
import sysconfig

import torch

SHORTEST, LONGEST = 200, 3000  # bytes; a document must fit into a pack and some must be longer than a rank's rows
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}


def documents(seed):
    """The files' bytes, in an order that the seed fixes."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))
    random.Random(seed).shuffle(files)
    texts = (path.read_bytes() for path in files)
    return [text for text in texts if SHORTEST <= len(text) <= LONGEST]


def packs(count, rows, seed):
    """`count` lists of documents of at most `rows` bytes in all; a document that does not fit begins the next."""
    packs = [[]]
    for text in itertools.cycle(documents(seed)):
        if sum(map(len, packs[-1])) + len(text) > rows:
            if len(packs) == count:
                return packs
            packs.append([])
        packs[-1].append(text)


def batch_of(pack, rows):
    """ids and labels (not yet shifted) [1, rows]; behind the documents lies padding."""
    text = b"".join(pack)
    ids = torch.tensor([list(text.ljust(rows, b"\0"))])
    labels = ids.clone()
    labels[:, len(text) :] = -100
    return {"input_ids": ids, "labels": labels}


def supervised(pack):
    """Every byte but the first of a document is predicted."""
    return sum(len(text) - 1 for text in pack)
