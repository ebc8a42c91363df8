"""The house itself: no import cycles, and every big room says how to add one more."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.hlo import attribution

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "jaxpar"
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(HOUSE.rglob("*.py"))
}
BIG = (
    "mesh",
    "models",
    "sharding",
    "pipeline",
    "exchange",
    "parallel",
    "parallel/techniques",
    "plan",
    "hlo",
    "inspector",
    "step",
    "data",
    "train",
    "job",
)


def imports(path):
    """Returns the modules that a file imports: at once, deferred, or for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {each if (each := f"{node.module}.{name.name}") in FILES else node.module for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found & FILES.keys()


def test_no_module_imports_itself_by_way_of_others():
    graph = {module: imports(path) for module, path in FILES.items()}
    while leaves := {module for module, needs in graph.items() if not needs & graph.keys()}:
        graph = {module: needs for module, needs in graph.items() if module not in leaves}
    assert not graph, f"knots among {sorted(graph)}"


@pytest.mark.parametrize("room", BIG)
def test_a_big_room_says_what_it_is_for_and_how_to_add_one_more(room):
    said = ast.get_docstring(ast.parse((HOUSE / room / "__init__.py").read_text()))
    assert said
    assert len(said.splitlines()) >= 4
    assert "Nouns: " in said


def test_files_that_explain_no_instruction_are_there():
    assert [path for path in attribution.MACHINERY if path.startswith(str(HOUSE)) and not Path(path).exists()] == []


PLAIN_STEP = """
import sys
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
import jaxpar as jp

jp.simulate(8)
layout = jp.compose(lambda rngs: nnx.Linear(16, 32, rngs=rngs), jp.Parallel(data=2, fsdp=2, tensor=2))
optimizer = optax.adam(1e-3)
step = jp.train_step(layout, lambda model, batch: (jnp.sum(model(batch["x"]) ** 2), batch["x"].size), optimizer)
step(jp.init_state(layout, optimizer), {"x": np.zeros((8, 16), np.float32)})
print(*sorted(name for name in sys.modules if name.startswith("jaxpar")))
"""


def test_a_plain_step_loads_no_planner_no_inspector_and_no_pipeline():
    result = subprocess.run([sys.executable, "-c", PLAIN_STEP], capture_output=True, text=True, check=True)
    modules = result.stdout.split()
    others = ("jaxpar.plan", "jaxpar.inspector", "jaxpar.pipeline", "jaxpar.html", "jaxpar.job", "jaxpar.cli")
    assert [name for name in modules if name.startswith(others)] == []
    assert len(modules) <= 200
    assert sum(len(FILES[name].read_text().splitlines()) for name in modules) <= 20_000
