"""The Python of the README runs as it stands."""

import json
import re
from pathlib import Path

from eval.scenes import sample

README = Path(__file__).parent.parent / "README.md"


def test_python_of_the_readme(tmp_path, monkeypatch, capsys):
    """Breaks when a name in the README's Python is gone, or its lines do not work one after the other."""
    monkeypatch.chdir(tmp_path)
    sample("vqa", "test", 192).image.save("scene.png")
    record = {"image": "scene.png", "prefix": "answer en Where is the dog?", "suffix": "top left"}
    Path("train.jsonl").write_text(f"{json.dumps(record)}\n" * 4)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, README.name, "exec"), {"__name__": "readme"})
        assert capsys.readouterr().out.strip(), block
