"""The tutorials: notebooks that are run here, kept with their output, and shown by mkdocs.

`python tools/notebooks.py` runs every notebook of docs/tutorials in a fresh kernel and an empty
folder, and writes it back with what came out. A notebook with an error, a warning or a path of this
machine in its output is not written.

mkdocs takes this file as a hook: a notebook becomes a page like any other, so that its links are
checked and nothing is fetched from elsewhere when it is read.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_MACHINE = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|mnt|var|Users|private)/|[A-Z]:\\")


# -- running them ---------------------------------------------------------------------------------


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the output of a fresh kernel; an error in a cell is raised."""
    import nbformat
    from nbclient import NotebookClient

    running = nbformat.reads(json.dumps(notebook), as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            running,
            timeout=900,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
    return cleaned(json.loads(nbformat.writes(running)))


def cleaned(notebook: dict[str, Any]) -> dict[str, Any]:
    """Without anything that tells of a machine or a time; of a cell's metadata `alt` stays."""
    cells = []
    for cell in notebook["cells"]:
        alt = {"alt": cell["metadata"]["alt"]} if "alt" in cell["metadata"] else {}
        outputs = [_without_metadata(output) for output in cell.get("outputs", ())]
        cells.append(cell | {"metadata": alt} | ({"outputs": outputs} if "outputs" in cell else {}))
    return notebook | {"cells": cells, "metadata": METADATA}


def _without_metadata(output: dict[str, Any]) -> dict[str, Any]:
    return output | {"metadata": {}} if "metadata" in output else output


def problems(notebook: dict[str, Any]) -> list[str]:
    """Why a notebook must not be kept as it is; none of one that was run and may be shown."""
    found = []
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    if counts != [*range(1, len(code) + 1)]:
        found.append(f"its cells were not run once each, in order: {counts}")
    for number, cell in enumerate(code, 1):
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                found.append(f"cell {number} ended in {output['ename']}: {output['evalue']}")
            if output.get("name") == "stderr":
                found.append(f"cell {number} wrote to stderr: {''.join(output['text'])}")
            found += [
                f"cell {number} shows a path of a machine: {text[place.start() :][:80]!r}"
                for text in texts(output)
                for place in _MACHINE.finditer(text)
            ]
    outputs = [output for cell in code for output in cell["outputs"]]
    if not any("ε" in text for output in outputs for text in texts(output)):
        found.append("ε is in none of its outputs")
    return found


def texts(output: dict[str, Any]) -> Iterator[str]:
    """What an output says, in every form in which it says it."""
    if "text" in output:
        yield "".join(output["text"])
    for kind, content in output.get("data", {}).items():
        if kind.startswith("text/"):
            yield "".join(content)


def main(arguments: list[str] | None = None) -> int:
    """1 if one of the notebooks could not be run or kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", type=Path, nargs="*", help="by default all tutorials")
    failed = 0
    for path in parser.parse_args(arguments).notebooks or sorted(TUTORIALS.glob("*.ipynb")):
        began = time.monotonic()
        try:
            notebook = execute(json.loads(path.read_text(encoding="utf-8")))
            wrong = problems(notebook)
        except Exception as error:  # a cell's, which nbclient shows with its source
            wrong = [str(error)]
        if wrong:
            failed += 1
            print(f"{path.name} is as it was:", *wrong, sep="\n  ", file=sys.stderr)
            continue
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        path.write_text(f"{text}\n", encoding="utf-8")
        print(f"{path.name}: {time.monotonic() - began:.0f} s")
    return failed > 0


# -- showing them ---------------------------------------------------------------------------------


def markdown(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by their file names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                file = f"{name}-{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![{cell['metadata']['alt']}]({file})")
            elif "text/html" in data:
                parts.append(_table("".join(data["text/html"])))
            else:
                text = "".join(output.get("text", data.get("text/plain", ())))
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def _table(html: str) -> str:
    """Without the style that pandas brings, so that the site's own applies."""
    html = re.sub(r"<style.*?</style>", "", html, flags=re.DOTALL)
    return re.sub(r'<table border="1" class="dataframe">', "<table>", html).strip()


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: notebooks are pages, and their pictures are files beside them."""
    from mkdocs.structure.files import File

    class Notebook(File):
        def is_documentation_page(self) -> bool:
            return True

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        taken = (file.src_uri, file.src_dir, file.dest_dir, file.use_directory_urls)
        files.append(Notebook(*taken, inclusion=file.inclusion))
        folder = file.src_uri.rpartition("/")[0]
        for name, content in markdown(json.loads(file.content_string), file.name)[1].items():
            files.append(File.generated(config, f"{folder}/{name}", content=content))
    return files


def on_page_read_source(page: Any, config: Any) -> str | None:
    """mkdocs: the Markdown of a page that is a notebook."""
    if not page.file.src_uri.endswith(".ipynb"):
        return None
    return markdown(json.loads(page.file.content_string), page.file.name)[0]


if __name__ == "__main__":
    sys.exit(main())
