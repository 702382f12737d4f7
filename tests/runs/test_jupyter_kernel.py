"""Test the guide's cells in a real Jupyter kernel with a running event loop, with their output.

It needs `pip install ipykernel nbclient` in the environment of the tests, which nothing else here does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.test_notebook_html import harmless

pytestmark = [pytest.mark.campaign, pytest.mark.filterwarnings("default")]
nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel are not installed here")
nbformat = pytest.importorskip("nbformat", reason="nbclient and ipykernel are not installed here")
pytest.importorskip("ipykernel", reason="ipykernel is not installed here")

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "notebooks.md"
SHOWN = ["task", "run", "both", "worst", "worst.to_episode()", "worst.to_result()", "await task.run_async()"]


def cells() -> list[str]:
    """Return the guide's blocks in order, titled blocks as notebook files, and then the inspected values."""
    blocks = re.findall(r"^```python(?: title=\"(\S+)\")?\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return [f"%%writefile {title}\n{text}" if title else text for title, text in blocks] + SHOWN


def test_the_guide_runs_in_a_kernel_and_shows_tables(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells()])
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown: dict[str, Any] = {cell.source: cell.outputs for cell in notebook.cells if cell.source in SHOWN}
    for source, outputs in shown.items():
        (output,) = outputs
        assert harmless(output["data"]["text/html"]).text, source
        assert len(output["data"]["text/plain"]) < 1_000, source
    printed = [output for cell in notebook.cells for output in cell.outputs if output.output_type == "stream"]
    assert any("mean score" in output["text"] for output in printed)
    assert not any("text/html" in output.get("data", {}) for cell in notebook.cells[:-7] for output in cell.outputs)
