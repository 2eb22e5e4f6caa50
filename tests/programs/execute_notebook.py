"""Runs tf_xshard/docs/digits.ipynb and writes its outputs into it.

`python -m tests.programs.execute_notebook`, which needs no Jupyter: the cells
are run in this process; what they print and draw is their output. Jupyter would
add TensorFlow's log.
"""

import base64
import contextlib
import io
import json

from matplotlib import pyplot

from tests.support import paths

NOTEBOOK = paths.ROOT / "tf_xshard" / "docs" / "digits.ipynb"


def _picture():
    """The current figure, as a notebook has it."""
    file = io.BytesIO()
    pyplot.savefig(file, format="png", bbox_inches="tight", dpi=80)
    pyplot.close("all")
    data = {"image/png": base64.b64encode(file.getvalue()).decode()}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def _outputs_of(source, scope):
    """Runs a cell; its outputs as a notebook has them."""
    pictures, printed = [], io.StringIO()
    pyplot.show = lambda: pictures.append(_picture())
    with contextlib.redirect_stdout(printed):
        exec(compile(source, NOTEBOOK, "exec"), scope)
    if not (text := printed.getvalue().splitlines(True)):
        return pictures
    return [
        {"output_type": "stream", "name": "stdout", "text": text},
        *pictures,
    ]


def main():
    pyplot.switch_backend("Agg")
    notebook, scope = json.loads(NOTEBOOK.read_text()), {}
    code = [one for one in notebook["cells"] if one["cell_type"] == "code"]
    for count, cell in enumerate(code, 1):
        print(f"cell {count} of {len(code)}", flush=True)
        cell["outputs"] = _outputs_of("".join(cell["source"]), scope)
        cell["execution_count"] = count
    NOTEBOOK.write_text(json.dumps(notebook, indent=1) + "\n")


if __name__ == "__main__":
    main()
