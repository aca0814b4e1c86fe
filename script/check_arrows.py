#!/usr/bin/env python3
"""Checks what the architecture forbids and a compiler does not see. Prints one line a slip.

An arrow "A <- B" in docs/design.md means that B may include and link A.
"""

import pathlib
import re
import subprocess
import sys

MAY_INCLUDE = {
    "base": set(),
    "schedule": {"base"},
    "plan": {"base", "schedule"},
    "kernels": {"base"},
    "transport": {"base"},
    "engine": {"base", "schedule", "kernels", "transport"},
    "torch": {"base", "schedule", "plan", "kernels", "transport", "engine"},
    "cli": {"base", "schedule", "plan", "kernels", "transport", "engine"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
LINK = re.compile(r"\bblockcp_(base|schedule|plan|kernels|transport|engine|torch)\b")
TORCH_HEADER = re.compile(r"^(torch|ATen|c10)/")
# The library is told, it does not ask or speak: no environment, no output, no end of the process.
FORBIDDEN = re.compile(
    r"\bgetenv\b|\bstd::(cout|cerr|clog)\b|\b(printf|fprintf|puts|fputs)\s*\(|(?<![.>])\b(abort\s*\(\s*\)|_?exit\s*\()"
)
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
TEXT = {".h", ".cpp", ".py", ".md", ".txt", ".cmake", ".in", ".toml", ".json", ".csv", ".yml", ""}


def tracked():
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    return [pathlib.Path(line) for line in listing.stdout.splitlines() if pathlib.Path(line).is_file()]


def folder_of(path):
    parts = path.parts
    if parts[0] == "blockcp" and len(parts) > 2:
        return parts[1]
    return "cli" if parts[0] == "cli" else None


def include_slips(path, text):
    folder = folder_of(path)
    if folder not in MAY_INCLUDE:
        return
    for header in INCLUDE.findall(text):
        target = header.split("/")[1] if header.startswith("blockcp/") and header.count("/") > 1 else None
        if target and target != folder and target not in MAY_INCLUDE[folder]:
            yield f"{folder} must not include {header}: the arrow goes the other way"
        if TORCH_HEADER.match(header) and folder != "torch":
            yield f"{header} is included outside blockcp/torch"


def link_slips(path, text):
    folder = folder_of(path)
    if folder not in MAY_INCLUDE:
        return
    for target in LINK.findall(text):
        if target != folder and target not in MAY_INCLUDE[folder]:
            yield f"{folder} must not link blockcp_{target}: the arrow goes the other way"


def speech_slips(path, text):
    if path.parts[0] != "blockcp":
        return
    for number, line in enumerate(NOT_CODE.sub(keep_lines, text).splitlines(), 1):
        if found := FORBIDDEN.search(line):
            yield f"line {number}: '{found.group().strip()}' has no place in the library"


def keep_lines(match):
    return "\n" * match.group().count("\n")


def slips(path):
    if path.suffix not in TEXT:
        return
    data = path.read_bytes()
    if not data.isascii():
        line = 1 + data[: next(i for i, byte in enumerate(data) if byte > 127)].count(b"\n")
        yield f"line {line}: only ASCII, please"
    text = data.decode("utf-8", "replace")
    if path.suffix in {".h", ".cpp"}:
        yield from include_slips(path, text)
        yield from speech_slips(path, text)
    if path.name == "CMakeLists.txt":
        yield from link_slips(path, text)


def main():
    found = [f"{path}: {slip}" for path in tracked() for slip in slips(path)]
    print("\n".join(found))
    sys.exit(1 if found else 0)


main()
