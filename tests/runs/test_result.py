"""What a notebook shows: results, their history, errors, and the knobs that an editor completes."""

from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys
import typing
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
import typed
from conftest import rank_environment
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

import fedmpi
from fedmpi import Result
from fedmpi.errors import CommonError, RunError, UserError
from fedmpi.runs.aliases import real_name
from fedmpi.runs.config import Config
from fedmpi.runs.options import from_values
from fedmpi.runs.result import History, curve
from fedmpi.runs.typed import Knobs


def report(round: int, score: float | None, **more: Any) -> dict[str, Any]:
    seconds = {"local": 0.5 * round, "wait": 0.0}
    return {"round": round, "seconds": seconds, "dropped_clients": [3], "test_loss": 1.0, "test_accuracy": score} | more


def result(*scores: float | None, **changes: Any) -> Result:
    reports = [report(number, score) for number, score in enumerate(scores, 1)]
    config = replace(Config(), mask="gma", model="Net", data="<b>mine</b>", rounds=len(scores))
    return replace(Result(nn.Linear(1, 1), reports, config, None, 0), **changes)


# The result


def test_a_result_is_one_short_line() -> None:
    said = repr(result(0.5, 0.75, 0.625))
    assert said == "<fedmpi.Result fedavg, mask gma, Net on <b>mine</b>: 3 rounds, accuracy 0.6250, best 0.7500>"
    assert repr(result(0.5, 0.75, rises=False)).endswith("accuracy 0.7500, best 0.5000>")
    assert repr(result(0.5, None, out=Path("runs/a"))).endswith("2 rounds, accuracy 0.5000, best 0.5000, out='runs/a'>")
    assert repr(result(None)).endswith("1 rounds, no accuracy>") and result(None).best is None


def test_the_html_view_has_the_curve_and_is_escaped() -> None:
    html = result(0.5, None, 0.75, 0.625, out=Path("a&b"))._repr_html_()
    page = ET.fromstring(f"<page>{html}</page>")  # which refuses what is not closed
    assert "<b>mine" not in html and "a&amp;b" in html and "&lt;b&gt;mine" in html
    (line,) = page.iter("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == 3, "rounds that were not scored are left out"
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert points[0][1] > points[2][1] > points[1][1], "higher is higher"
    cells = ["".join(cell.itertext()) for cell in page.iter("td")]
    assert cells[cells.index("test_accuracy") + 1] == "0.625"


@pytest.mark.parametrize("scores", [{}, {1: 0.5}, {1: 0.5, 2: 0.5}, {1: -1e-9, 1000: 1e30}])
def test_a_curve_of_anything_stays_in_its_frame(scores: dict[int, float]) -> None:
    svg = curve(scores, 'test_"odd"<name>')
    assert bool(svg) == bool(scores)
    for point in re.findall(r"([-\d.]+),([-\d.]+)", "".join(re.findall('points="(.*?)"', svg))):
        assert 0 <= float(point[0]) <= 460 and 0 <= float(point[1]) <= 190
    if svg:
        ET.fromstring(svg)


# The history


def test_the_history_is_a_frame_and_without_pandas_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = result(0.5, 0.75).history
    assert isinstance(frame, pandas.DataFrame) and frame["test_accuracy"].tolist() == [0.5, 0.75]
    assert frame["seconds/local"].tolist() == [0.5, 1.0] and frame["dropped_clients"].tolist() == [[3], [3]]
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    rows = result(0.5, 0.75).history
    assert isinstance(rows, History) and rows[-1]["round"] == 2 and len(rows[:1]) == 1
    assert {name: rows[name] for name in frame.columns} == {name: frame[name].tolist() for name in frame.columns}
    with pytest.raises(KeyError, match="nothing"):
        _ = rows["nothing"]


def test_pandas_is_not_imported_by_training() -> None:
    code = "import fedmpi, sys; fedmpi.train; print([m for m in ('pandas', 'IPython') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=rank_environment(), capture_output=True, timeout=100)
    assert done.stdout == b"[]\n", done.stderr


# In IPython itself


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An IPython that keeps its files to itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        found = InteractiveShell.instance()
        found.history_manager.enabled = False
        found.push({"fedmpi": fedmpi, "RunError": RunError, "CommonError": CommonError})
        yield found
        InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("fedmpi.train(None, [])", "UserError: data is empty; give one data set per client"),
        ("fedmpi.train(None, 'glyphs', ronds=3)", "UserError: unknown option 'ronds' in fedmpi.train; did you mean"),
        ("raise RunError('round 3: a rank is gone')", "RunError: round 3: a rank is gone"),
        ("raise CommonError('a full disk')", "CommonError: a full disk"),
    ],
)
def test_a_notebook_shows_an_error_as_one_line(
    cell: str, said: str, shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = shell.run_cell(cell)
    assert isinstance(outcome.error_in_exec, UserError | RunError)
    shown = capsys.readouterr()
    (line,) = (shown.out + shown.err).splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fedmpi.train(m, d, t, roun", "rounds="),
        ("fedmpi.train(m, d, t, batch_s", "batch_size="),
        ("fedmpi.train(m, d, t, local=fedmpi.Local(epo", "epochs="),
        ("fedmpi.Loca", "Local"),
    ],
)
def test_knobs_are_completed(text: str, found: str, shell: Any) -> None:
    with provisionalcompleter():
        shell.Completer.use_jedi = False  # which reads the same signatures, but takes seconds
        assert found in [one.text.lstrip(".") for one in shell.Completer.completions(text, len(text))]


# Types


def test_the_types_are_those_of_the_configuration() -> None:
    """`python -m tests.typed` writes them."""
    assert typed.FILE.read_text(encoding="utf-8") == typed.source()
    hints = typing.get_type_hints(Knobs)
    assert hints["rounds"] is int and hints["lr"] == float | None
    shown = inspect.signature(fedmpi.train).parameters
    assert set(hints) < set(shown) and all(real_name(name) for name in hints)
    assert shown["rounds"].default == 50 and shown["local"].default == fedmpi.Local()


def test_groups_may_be_given_as_dataclasses() -> None:
    asked = from_values({"local": fedmpi.Local(lr=0.1), "server": fedmpi.Server(lr=2.0), "eval": {"every": 3}})
    assert asked == replace(Config(), local=fedmpi.Local(lr=0.1), server=fedmpi.Server(lr=2.0), eval=fedmpi.Eval(3))
