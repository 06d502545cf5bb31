"""The README's code is run as it stands."""

import contextlib
import io
import pathlib
import re

import jax.numpy as jnp
import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"
CODE = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def first():
    """(names, what was printed) once the first piece of code has run."""
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(CODE[0], str(README), "exec"), names)
    return names, printed.getvalue().splitlines()


def test_the_code_of_the_readme_runs(first):
    assert first[1][-2:] == ["[9 6 0 0]", "True"]


def test_a_row_goes_to_the_host_and_comes_back_as_the_readme_says(first):
    names = dict(first[0], row=1, other_row=3)
    state, _ = names["kv"].admit(names["state"], jnp.array([1]))
    arguments = names["keys"], names["values"], jnp.array([0, 8, 0, 0])
    names["state"], names["storage"], _ = names["step"](state, names["storage"], *arguments)
    (code,) = (code for code in CODE if "import tiers" in code)
    exec(compile(code, str(README), "exec"), names)
    assert names["state"].seq_lens.tolist() == [0, 0, 0, 8]
    whole = {name: 4 * number for name, number in names["plan"].num_blocks.items()}
    assert names["tier"].pools.available() == whole
