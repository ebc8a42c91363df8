"""The house itself: no import cycles, and every big room says how to add one more."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

from jaxpar.hlo import source_frames

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


@pytest.mark.slow
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
    assert "Terms: " in said


def test_files_that_explain_no_instruction_are_there():
    assert [path for path in source_frames.MACHINERY if path.startswith(str(HOUSE)) and not Path(path).exists()] == []


WORDS = (  # participles, pronouns and prepositions name nothing
    "apart around asked at beside each found held kept known made of other own said says told via ways with without"
).split()
HEADS = re.compile(r"(Returns (what|how|who|which)|What|Who|Those|That which)\b")


def definitions(path):
    """Returns the functions and classes of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]


@pytest.mark.slow
def test_no_function_class_or_module_is_named_by_a_participle_a_pronoun_or_a_preposition():
    names = [f"{module}.{node.name}" for module, path in FILES.items() for node in definitions(path)]
    assert [name for name in [*FILES, *names] if name.rpartition(".")[2].strip("_") in WORDS] == []


@pytest.mark.slow
def test_a_docstring_says_who_does_what():
    texts = [(module, ast.get_docstring(node) or "") for module, path in FILES.items() for node in definitions(path)]
    assert [(module, text) for module, text in texts if HEADS.match(text)] == []


@pytest.mark.slow
def test_no_two_public_classes_have_one_name():
    modules = defaultdict(list)
    for module, path in FILES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(module)
    assert {name: files for name, files in modules.items() if len(files) > 1} == {}


def test_every_name_that_a_room_lists_resolves():
    for module, path in FILES.items():
        if path.name == "__init__.py":
            room = import_module(module)
            assert [name for name in getattr(room, "__all__", ()) if not hasattr(room, name)] == [], module


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


@pytest.mark.slow
def test_a_plain_step_loads_no_planner_no_inspector_and_no_pipeline():
    result = subprocess.run([sys.executable, "-c", PLAIN_STEP], capture_output=True, text=True, check=True)
    modules = result.stdout.split()
    others = ("jaxpar.plan", "jaxpar.inspector", "jaxpar.pipeline", "jaxpar.html", "jaxpar.job", "jaxpar.cli")
    assert [name for name in modules if name.startswith(others)] == []
    assert len(modules) <= 200
    lines = {name: len(FILES[name].read_text().splitlines()) for name in modules}
    largest = sorted(lines, key=lines.get, reverse=True)[:10]
    assert sum(lines.values()) <= 20_000, f"load what is not used later, where it is used; the largest: {largest}"
