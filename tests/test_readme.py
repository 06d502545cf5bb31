"""The README's code is run as it stands."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_code_of_the_readme_runs(capsys):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    exec(compile(code, str(README), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == ["[9 6 0 0]", "True"]
