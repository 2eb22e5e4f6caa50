"""Runs tf_xshard/docs/digits.ipynb and writes its outputs into it.

`python -m tests.programs.execute_notebook`, which needs no Jupyter: the cells
are run in this process; what they print and draw is their output.
"""

import base64
import contextlib
import io
import json

import matplotlib

from tests.support import paths

NOTEBOOK = paths.ROOT / "tf_xshard" / "docs" / "digits.ipynb"


def outputs_of(source: str, scope: dict) -> list[dict]:
    """Runs a cell; its outputs as a notebook has them."""
    from matplotlib import pyplot

    outputs = []

    def show():
        picture = io.BytesIO()
        pyplot.savefig(picture, format="png", bbox_inches="tight", dpi=80)
        pyplot.close("all")
        outputs.append(
            {
                "output_type": "display_data",
                "data": {
                    "image/png": base64.b64encode(picture.getvalue()).decode()
                },
                "metadata": {},
            }
        )

    pyplot.show = show
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, NOTEBOOK, "exec"), scope)
    if printed.getvalue():
        text = printed.getvalue().splitlines(True)
        stream = {"output_type": "stream", "name": "stdout", "text": text}
        outputs.insert(0, stream)
    return outputs


def main() -> None:
    matplotlib.use("Agg")
    notebook = json.loads(NOTEBOOK.read_text())
    scope: dict = {}
    code = [one for one in notebook["cells"] if one["cell_type"] == "code"]
    for count, cell in enumerate(code, 1):
        print(f"cell {count} of {len(code)}", flush=True)
        cell["outputs"] = outputs_of("".join(cell["source"]), scope)
        cell["execution_count"] = count
    NOTEBOOK.write_text(json.dumps(notebook, indent=1) + "\n")


if __name__ == "__main__":
    main()
