"""Where the rows of a benchmark are written, and what its options have in common."""

import json
import os
import pathlib


def positive(text):
    """For argparse, which makes a message of the ValueError."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def refused(path, error):
    return ValueError(f"[bench] --json must name a file that can be written, but '{path}' is none: {error.strerror}.")


def checked(path):
    """The file that a name means. ValueError if it cannot be written; what is in it stays until there are rows."""
    try:
        with open(path, "a"):
            return pathlib.Path(path).resolve()
    except OSError as error:
        raise refused(path, error) from error


def write(path, rows):
    """Whole or not at all: whoever reads meanwhile sees the rows before. Pipes and devices get it as it comes."""
    text = json.dumps(rows, indent=1) + "\n"
    try:
        if not path.is_file():
            path.write_text(text)
            return
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(text)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise refused(path, error) from error
