"""oomph in a notebook: models of a cell are planned, and answers are drawn."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest

CELLS = (
    """
    import torch, oomph

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 1)

        def forward(self, x):
            return self.layer(x)

    workload = oomph.Workload(
        model=Net,
        batch=lambda n: torch.zeros(n, 64),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )
    """,
    'plans = oomph.plan(workload, gpu="rtx4090")\nplans',
    "plans.best",
    'oomph.predict(workload, gpu="rtx4090")',
    "import torch; assert torch.zeros(1).device.type == 'cpu'  # the kernel itself is as before",
    'oomph.plan("train.ipynb", gpu="rtx4090")',
)


def srcdoc(drawn: str) -> str:
    found = re.fullmatch(r"<iframe srcdoc='([^']*)' sandbox='allow-scripts'.*</iframe>", drawn)
    assert found is not None, drawn[:200]
    return html.unescape(found[1])


@pytest.fixture(scope="module")
def run_cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The outputs of CELLS, run by a real kernel."""
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    home = tmp_path_factory.mktemp("notebook")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(home))
    patch.setenv("IPYTHONDIR", str(home))
    patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    cells = [nbformat.v4.new_code_cell(_dedented(cell)) for cell in CELLS]
    metadata = {"kernelspec": {"name": "python3", "display_name": "", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    client = nbclient.NotebookClient(notebook, timeout=None, allow_errors=True)
    try:
        client.execute(cwd=str(home))
    finally:
        patch.undo()
    return [cell.outputs for cell in notebook.cells]


def _dedented(cell: str) -> str:
    import textwrap

    return textwrap.dedent(cell)


def test_a_model_of_a_cell_is_planned_and_the_page_is_drawn(run_cells: list[Any]) -> None:
    (shown,) = run_cells[1]
    assert shown.output_type == "execute_result", shown
    assert shown.data["text/plain"].startswith("<Plans of workload on rtx4090: ")
    page = srcdoc(shown.data["text/html"])
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert data["plans"][0]["timeline"] is not None
    assert "train_step(model, " in data["plans"][0]["code"]


def test_a_plan_and_a_prediction_are_drawn_as_well(run_cells: list[Any]) -> None:
    (plan,), (prediction,) = run_cells[2], run_cells[3]
    assert '"num_candidates":null' in srcdoc(plan.data["text/html"])
    assert prediction.data["text/html"].startswith("<pre")
    assert "fits on rtx4090" in prediction.data["text/html"]
    assert prediction.data["text/plain"].startswith("<Prediction for rtx4090: fits, ")


def test_the_kernel_is_left_as_it_was(run_cells: list[Any]) -> None:
    assert run_cells[4] == []


def test_a_notebook_given_as_a_script_is_refused_with_the_way(run_cells: list[Any]) -> None:
    (error,) = run_cells[5]
    assert error.ename == "UsageError"
    assert "train.ipynb is a notebook" in error.evalue
    assert "jupyter nbconvert --to script train.ipynb" in error.evalue
