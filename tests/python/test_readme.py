"""The README's examples are the files in examples/, word for word, and those run."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = re.compile(r"<!-- (\S+) -->\n```\w+\n(.*?)```\n", re.DOTALL)


def examples():
    return dict(EXAMPLE.findall((ROOT / "README.md").read_text()))


def test_readme_shows_both_examples():
    assert set(examples()) == {"examples/python/quickstart.py", "examples/cpp/quickstart.cpp"}


@pytest.mark.parametrize("path", ["examples/python/quickstart.py", "examples/cpp/quickstart.cpp"])
def test_readme_shows_the_file(path):
    assert examples()[path] == (ROOT / path).read_text()


def test_examples_are_short():
    for path, text in examples().items():
        code = [line for line in text.splitlines() if line.strip() and not line.strip().startswith(("#!", "# ", "//"))]
        assert len(code) <= 15, path


def test_readme_links_exist():
    prose = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#]+)\)", prose)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_seed_map_names_tests_that_exist():
    rows = re.findall(r"^\| (?!name|---)(.*) \|$", (ROOT / "docs/seed-map.md").read_text(), flags=re.MULTILINE)
    cells = [row.split(" | ")[4] for row in rows]
    assert len(cells) > 50
    for cell in cells:
        named = re.findall(r"`(\w+\.(?:py|cpp))`: ((?:`\w+`(?:, )?)+)", cell)
        assert named or cell.startswith("none: "), cell
        for file, tests in named:
            text = (ROOT / "tests" / ("python" if file.endswith("py") else "") / file).read_text()
            for test in re.findall(r"`(\w+)`", tests):
                assert re.search(rf"\bdef {test}\(|^TEST.*\b{test}\b", text, flags=re.MULTILINE), (file, test)


@pytest.mark.dist
def test_python_quickstart_runs():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, ROOT / "examples/python/quickstart.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"rank (\d): path \w+, out \(1, 4, 16, 32\), \|dk\| [\d.]+", done.stdout)
    assert sorted(said) == ["0", "1", "2", "3"]


@pytest.mark.dist
def test_a_training_step_is_the_same_on_any_number_of_ranks():
    said = []
    for ranks in (1, 2, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        script = ROOT / "examples/python/train_step.py"
        done = subprocess.run([*command, script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        numbers = re.findall(r"rank \d: loss ([\d.]+), \|gradient of qkv\| ([\d.]+)", done.stdout)
        assert len(numbers) == ranks
        said += [tuple(float(number) for number in line) for line in numbers]
    for values in zip(*said):
        assert max(values) - min(values) < 5e-6, said  # printed to six digits
