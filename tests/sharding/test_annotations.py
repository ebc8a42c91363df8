"""Every way that JAX and Flax have to say how an array is split: honoured, or refused with the way out.

Of parameters the place is compared with what jaxpar would choose by itself, which is `tensor` on dim 1; of activations
the constraint is looked for in the lowered step.
"""

import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import meta
from flax.linen import partitioning
from flax.linen import spmd as linen_spmd
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, auto_axes, reshard
from jax.sharding import PartitionSpec as P
from pairwise import some

import jaxpar as jp
from jaxpar.errors import JaxparError

SPLIT = jp.Parallel(data=2, tensor=4)
INIT = nnx.initializers.lecun_normal()
ROWS, COLUMNS = P("tensor"), P(None, "tensor")
SHAPE = (16, 32)
CROSSED = (("embed", "tensor"), ("mlp", None))  # the opposite of what jaxpar means by these names
X = np.ones((16, 16), np.float32)


def own_mesh(*names, kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()).reshape(2, 4), names, axis_types=(kind,) * 2)


class Net(nnx.Module):
    """One matrix, made by a function of `rngs`."""

    def __init__(self, rngs, *, make):
        self.w = make(rngs)

    def __call__(self, x):
        return jnp.sum(x @ self.w[...], axis=-1)


class LinenNet(nn.Module):
    init: object = nn.initializers.lecun_normal()
    read: object = None

    @nn.compact
    def __call__(self, x):
        w = self.param("w", self.init, SHAPE) if self.read is None else self.read(self)
        return jnp.sum(x @ w, axis=-1)


def param(**metadata):
    return partial(Net, make=lambda rngs: nnx.Param(INIT(rngs.params(), SHAPE), **metadata))


def by_init(init):
    return partial(Net, make=lambda rngs: nnx.Param(init(rngs.params(), SHAPE)))


def by_value(make):
    return partial(Net, make=lambda rngs: nnx.Param(make(INIT(rngs.params(), SHAPE))))


def linen(init=None, **fields):
    return lambda: jp.from_linen(LinenNet(init, **fields) if init else LinenNet(**fields), X[:1])


def in_rules(context, model, rules=CROSSED):
    """Returns a factory that makes a model inside of a context of rules."""

    def factory(rngs):
        with context(rules):
            return model(rngs)

    return factory


def set_later(name="out_sharding"):
    def make(rngs):
        variable = nnx.Param(INIT(rngs.params(), SHAPE))
        variable.set_metadata(name, ("tensor", None))
        return variable

    return partial(Net, make=make)


def guide_before_eager_sharding(rngs):
    """Constrains the state of a model that is made, as Flax's guides did before variables were placed at once."""
    model = param(out_sharding=("tensor", None))(rngs)
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model


class Named(nnx.Param):
    pass


def boxed(kind, names, **fields):
    return lambda key, shape: kind(nn.initializers.lecun_normal()(key, shape), names=names, **fields)


NNX = {
    "out_sharding tuple": param(out_sharding=("tensor", None)),
    "out_sharding spec": param(out_sharding=P("tensor", None)),
    "out_sharding shorter": param(out_sharding=P("tensor")),
    "out_sharding two axes": param(out_sharding=P(("data", "tensor"), None)),
    "out_sharding model": param(out_sharding=("model", None)),
    "sharding": param(sharding=("tensor", None)),
    "sharding_names": param(sharding_names=("tensor", None)),
    "NamedSharding": lambda rngs: param(
        out_sharding=NamedSharding(own_mesh("data", "tensor"), P("tensor", None))
    )(rngs),
    "NamedSharding, axis model": lambda rngs: param(
        out_sharding=NamedSharding(own_mesh("data", "model"), P("model", None))
    )(rngs),
    "Format": lambda rngs: param(
        out_sharding=Format(Layout((0, 1)), NamedSharding(own_mesh("data", "tensor"), P("tensor", None)))
    )(rngs),
    "mesh": lambda rngs: param(out_sharding=("tensor", None), mesh=own_mesh("data", "tensor"))(rngs),
    "eager_sharding": param(out_sharding=("tensor", None), eager_sharding=True),
    "with_partitioning": by_init(nnx.with_partitioning(INIT, ("tensor", None))),
    "with_partitioning spec": by_init(nnx.with_partitioning(INIT, P("tensor", None))),
    "with_metadata": by_init(nnx.with_metadata(INIT, out_sharding=("tensor", None))),
    "set_metadata": set_later(),
    "subclass of Param": partial(
        Net, make=lambda rngs: Named(INIT(rngs.params(), SHAPE), out_sharding=("tensor", None))
    ),
    "sharding_rules": param(out_sharding=("embed", "mlp"), sharding_rules=CROSSED),
    "sharding_rules spec": param(out_sharding=P("embed", "mlp"), sharding_rules=CROSSED),
    "sharding_rules, axis model": param(
        out_sharding=("embed", "mlp"), sharding_rules=(("embed", "model"), ("mlp", None))
    ),
    "with_partitioning rules": by_init(nnx.with_partitioning(INIT, ("embed", "mlp"), sharding_rules=CROSSED)),
    "logical_axis_rules inside": in_rules(nnx.logical_axis_rules, param(out_sharding=("embed", "mlp"))),
    "nn.logical_axis_rules inside": in_rules(nn.logical_axis_rules, param(out_sharding=("embed", "mlp"))),
    "rules, some names": param(out_sharding=("tensor", "mlp"), sharding_rules=(("mlp", None),)),
    "guide before eager sharding": guide_before_eager_sharding,
    "init out_sharding": by_init(partial(INIT, out_sharding=P("tensor", None))),
    "init out_sharding, axis model": by_init(partial(INIT, out_sharding=P("model", None))),
    "normal out_sharding": by_init(lambda key, shape: jax.random.normal(key, shape, out_sharding=P("tensor", None))),
    "zeros out_sharding": by_init(lambda key, shape: jnp.zeros(shape, out_sharding=P("tensor", None))),
    "reshard": by_value(lambda x: reshard(x, P("tensor", None))),
    "device_put": by_value(lambda x: jax.device_put(x, NamedSharding(own_mesh("data", "tensor"), P("tensor", None)))),
    "with_sharding_constraint": by_value(lambda x: jax.lax.with_sharding_constraint(x, P("tensor", None))),
    "with_sharding_constraint, transposed": by_value(
        lambda x: jax.lax.with_sharding_constraint(x.T, P(None, "tensor")).T * 2
    ),
    "with_sharding_constraint NamedSharding": by_value(
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(own_mesh("data", "tensor"), P("tensor", None)))
    ),
}  # fmt: skip

LINEN = {
    "with_partitioning": linen(nn.with_partitioning(nn.initializers.lecun_normal(), ("tensor", None))),
    "with_partitioning, axis model": linen(nn.with_partitioning(nn.initializers.lecun_normal(), ("model", None))),
    "Partitioned": linen(boxed(nn.Partitioned, ("tensor", None))),
    "with_partitioning mesh": lambda: linen(
        nn.with_partitioning(nn.initializers.lecun_normal(), ("tensor", None), mesh=own_mesh("data", "tensor"))
    )(),
    "with_logical_partitioning": linen(nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))),
    "with_logical_partitioning rules": linen(
        nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"), rules=CROSSED)
    ),
    "LogicallyPartitioned rules": linen(boxed(nn.LogicallyPartitioned, ("embed", "mlp"), rules=CROSSED)),
    "param_with_axes": linen(
        read=lambda _: partitioning.param_with_axes("w", nn.initializers.lecun_normal(), SHAPE, axes=("mlp", "embed"))
    ),
    "init out_sharding": linen(partial(nn.initializers.lecun_normal(), out_sharding=P("tensor", None))),
    "with_sharding_constraint": linen(
        lambda *args: jax.lax.with_sharding_constraint(nn.initializers.lecun_normal()(*args), P("tensor", None))
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _deprecated_names_are_names():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is deprecated, use 'out_sharding' instead", DeprecationWarning)
        yield


def stored(model, parallel=SPLIT, path="w"):
    return jp.compose(model, parallel).placements[path].stored


def test_without_a_word_jaxpar_chooses_columns():
    assert stored(param()) == stored(linen()()) == COLUMNS


@pytest.mark.parametrize("way", NNX)
def test_a_parameter_of_nnx_is_where_its_author_put_it(way):
    assert stored(NNX[way]) == (P(("data", "tensor")) if way == "out_sharding two axes" else ROWS)


@pytest.mark.parametrize("way", LINEN)
def test_a_parameter_of_linen_is_where_its_author_put_it(way):
    assert stored(LINEN[way]()) == ROWS


@pytest.mark.parametrize("context", [nnx.logical_axis_rules, nn.logical_axis_rules, partitioning.axis_rules])
@pytest.mark.parametrize(
    "model",
    [
        lambda: param(out_sharding=("embed", "mlp")),
        linen(nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))),
        lambda: linen(
            read=lambda _: partitioning.param_with_axes(
                "w", nn.initializers.lecun_normal(), SHAPE, axes=("embed", "mlp")
            )
        )(),
    ],
    ids=["nnx", "linen", "t5x"],
)
def test_rules_around_are_heard_and_the_users_come_before_them(context, model):
    with context(CROSSED):
        assert stored(model()) == ROWS
        assert stored(model(), jp.Parallel(data=2, tensor=4, rules={"embed": None, "mlp": "tensor"})) == COLUMNS
    outside = model()
    assert stored(outside) == COLUMNS
    with context(CROSSED):  # a model that was made before
        assert stored(outside) == ROWS


def test_rules_that_are_set_for_good_are_heard():
    before = linen_spmd.get_logical_axis_rules()
    try:
        nn.set_logical_axis_rules(CROSSED)
        assert stored(param(out_sharding=("embed", "mlp"))) == ROWS
    finally:
        nn.set_logical_axis_rules(before)


def test_linen_rules_inside_of_a_call_are_heard():
    class Inside(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            with nn.logical_axis_rules(CROSSED):
                return nn.Dense(32, kernel_init=init)(x)

    assert stored(jp.from_linen(Inside(), X), path="Dense_0/kernel") == ROWS


@pytest.mark.parametrize("name", ["layers", None])
def test_a_stack_of_nnx_has_its_specs_behind_the_dim_of_layers(name):
    def stack(init):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: name})
        def made(rngs):
            return nnx.Linear(16, 32, kernel_init=init, rngs=rngs)

        return made

    for init in (nnx.with_partitioning(INIT, ("tensor", None)), partial(INIT, out_sharding=P("tensor", None))):
        assert stored(stack(init), path="kernel") == P(None, "tensor")


def test_a_stack_of_a_vmap_of_jax_has_its_specs_too():
    def make(rngs):
        made = jax.vmap(lambda rngs: nnx.Param(jnp.zeros(SHAPE, out_sharding=P("tensor", None)) + 1.0))
        return made(rngs.fork(split=2) if not hasattr(rngs, "split") else rngs.split(2))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.w, self.v = make(rngs), param(out_sharding=("tensor", None))(rngs)

    assert stored(Stack) == P(None, "tensor")


@pytest.mark.parametrize("way", ["scan", "vmap", "scan_with_axes", "explicit"])
def test_a_stack_of_linen_has_its_specs_behind_the_dim_of_layers(way):
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
    if way == "explicit":
        init = partial(nn.initializers.lecun_normal(), out_sharding=P("tensor", None))

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, *_):
            if way == "scan_with_axes":
                w = partitioning.param_with_axes(
                    "kernel", nn.initializers.lecun_normal(), (16, 16), axes=("mlp", "embed")
                )
            else:
                w = self.param("kernel", init, (16, 16))
            return (x @ w, None) if way != "vmap" else x @ w

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            named = {"metadata_params": {nn.PARTITION_NAME: "layers"}}
            if way == "vmap":
                return nn.vmap(Layer, in_axes=None, axis_size=2, **lifted, **named)(name="stack")(x).sum(0)
            if way == "scan_with_axes":
                lifted["variable_axes"] = {"params": 0}
                return partitioning.scan_with_axes(Layer, length=2, axis_name="layers", **lifted)(name="stack")(
                    x, None
                )[0]
            return nn.scan(Layer, length=2, **lifted, **named)(name="stack")(x, None)[0]

    assert stored(jp.from_linen(Stack(), X), path="stack/kernel") == P(None, "tensor")


def test_other_state_is_where_its_author_put_it():
    class Averages(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(INIT(rngs.params(), SHAPE))
            self.mean = nnx.BatchStat(jnp.zeros(SHAPE), out_sharding=("embed", "mlp"), sharding_rules=CROSSED)

        def __call__(self, x):
            return x @ (self.w[...] + self.mean[...])

    assert jp.compose(Averages, SPLIT).other_state["mean"].stored == ROWS


@pytest.mark.parametrize(
    ("model", "fix"),
    [
        (param(out_sharding=("embed", "mlp"), sharding_rules=(("embed", "x"), ("mlp", None))), 'rules={"x": "tensor"}'),
        (by_init(partial(INIT, out_sharding=P("x", None))), 'rules={"x": "tensor"}'),
        (param(out_sharding=("x", None)), "rules={'x': 'tensor'}"),
        (param(out_sharding=("tensor", None), opt_sharding=(None, "tensor")), "leave opt_sharding out"),
    ],
    ids=["an axis in rules", "an axis in an initializer", "a name", "optimizer apart"],
)
def test_what_the_mesh_does_not_have_is_refused_with_the_way_out(model, fix):
    with pytest.raises(JaxparError) as refusal:
        jp.compose(model, SPLIT)
    assert fix in str(refusal.value)
    if "x" in fix.split(":")[0]:
        assert stored(model, jp.Parallel(data=2, tensor=4, rules={"x": "tensor"})) == ROWS


class Pair(nnx.Module):
    """Two matrices with the annotations of an author who may turn sharding off."""

    def __init__(self, rngs, *, axis):
        self.up = nnx.Param(INIT(rngs.params(), SHAPE, out_sharding=P(None, axis)))
        self.down = nnx.Param(INIT(rngs.params(), SHAPE[::-1]), out_sharding=P(None, None), eager_sharding=False)

    def __call__(self, x):
        return jnp.sum(x @ self.up[...] @ self.down[...], axis=-1)


def test_annotations_that_name_no_dim_of_the_model_say_nothing():
    off, on = (partial(Pair, axis=axis) for axis in (None, "tensor"))
    assert (stored(off, path="up"), stored(off, path="down")) == (COLUMNS, ROWS)
    assert (stored(on, path="up"), stored(on, path="down")) == (COLUMNS, P())  # here None is a dim that stays whole
    with pytest.raises(JaxparError, match="tensor=4 does nothing"):
        jp.compose(on, jp.Parallel(data=2, tensor=4, rules={"tensor": None}))


def test_a_pattern_meant_as_a_glob_is_told_as_an_expression():
    with pytest.raises(JaxparError, match=r"'layers/\.\*/kernel': a pattern is a regular expression"):
        jp.compose(Layers, jp.Parallel(data=2, tensor=4, paths={"layers/*/kernel": (None, "mlp")}))


class Layers(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


def test_a_name_without_a_rule_is_noted():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 32, kernel_init=nnx.with_partitioning(INIT, ("embed", "mlpp")), rngs=rngs)
            self.down = nnx.Linear(32, 16, kernel_init=nnx.with_partitioning(INIT, ("mlp", "embed")), rngs=rngs)

        def __call__(self, x):
            return self.down(self.up(x))

    (note,) = jp.compose(Two, SPLIT).notes
    assert "names without a rule, whose dims are whole: mlpp" in note


class Activations(nnx.Module):
    def __init__(self, rngs, *, say):
        self.up, self.down, self.say = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs), say

    def __call__(self, x):
        return self.down(self.say(nnx.relu(self.up(x))))


class LinenActivations(nn.Module):
    say: object

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(self.say(nn.relu(nn.Dense(32)(x))))


def in_call(context, rules, x, names):
    with context(rules):
        return nn.with_logical_constraint(x, names)


def replaced_axes(x, *axes):
    return jnp.dot(x, jnp.eye(x.shape[-1]), out_sharding=P(*axes))


AUTHORS = (("rows", "data"), ("columns", "model"))
# on the layout: examples over data and fsdp, features over tensor
WAYS = {
    "constrain": lambda x: jp.constrain(x, "batch", "mlp"),
    "with_logical_constraint": lambda x: nn.with_logical_constraint(x, ("batch", "mlp")),
    "with_logical_constraint rules": lambda x: nn.with_logical_constraint(x, ("rows", "columns"), rules=AUTHORS),
    "with_logical_constraint mesh": lambda x: nn.with_logical_constraint(
        x, ("rows", "columns"), rules=AUTHORS, mesh=own_mesh("data", "model")
    ),
    "with_logical_constraint fallback": lambda x: nn.with_logical_constraint(
        x, ("rows", "columns"), rules=AUTHORS, fallback=nn.spmd.RulesFallback.RAISE_ERROR
    ),
    "rules in the call": lambda x: in_call(nn.logical_axis_rules, AUTHORS, x, ("rows", "columns")),
    "t5x": lambda x: partitioning.with_sharding_constraint(x, ("batch", "mlp")),
    "t5x rules in the call": lambda x: in_call(partitioning.axis_rules, AUTHORS, x, ("rows", "columns")),
    "spec": lambda x: jax.lax.with_sharding_constraint(x, P("data", "model")),
    "spec of all examples": lambda x: jax.lax.with_sharding_constraint(x, P(("data", "fsdp"), "tensor")),
    "NamedSharding": lambda x: jax.lax.with_sharding_constraint(
        x, NamedSharding(own_mesh("data", "model"), P("data", "model"))
    ),
    "device_put": lambda x: jax.device_put(x, NamedSharding(own_mesh("data", "model"), P("data", "model"))),
    "out_sharding": lambda x: replaced_axes(x, "data", "model"),
    "einsum out_sharding": lambda x: jnp.einsum("bd,de->be", x, jnp.eye(32), out_sharding=P("data", "model")),
    "reshape out_sharding": lambda x: jnp.reshape(x, x.shape, out_sharding=P("data", "model")),
    "reshard": lambda x: reshard(x, P("data", "model")),
    "auto_axes": lambda x: auto_axes(lambda x: x * 2, out_sharding=P("data", "model"))(x),
    "jit out_shardings": lambda x: jax.jit(lambda x: x * 2, out_shardings=P("data", "model"))(x),
}


def loss(model, batch):
    difference = (model(batch["x"]) - batch["x"]) ** 2
    return jnp.sum(difference), difference.size


def lowered(model, parallel):
    step = jp.train_step(jp.compose(model, parallel), loss, optax.sgd(0.1))
    return step.lower(step.abstract(), {"x": X}).as_text()


BOTH = jp.Parallel(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize("flax", ["nnx", "nnx with inputs", "linen"])
@pytest.mark.parametrize("way", some(WAYS, ["spec"]))
def test_an_activation_is_split_as_its_author_says(way, flax):
    factory = partial(Activations, say=WAYS[way])
    if flax == "linen":
        factory = jp.from_linen(LinenActivations(WAYS[way]), X)
    elif flax == "nnx with inputs":
        factory = jp.from_nnx(factory, X)
    text = lowered(factory, BOTH)
    assert '[{"data", "fsdp"}, {"tensor"}]' in text


@pytest.mark.parametrize(
    ("spec", "lowered_spec"),
    [
        (P(), "[{}, {}]"),
        (P("data"), '[{"data", "fsdp"}, {}]'),
        (P(None, "model"), '[{}, {"tensor"}]'),
        (P(P.UNCONSTRAINED, "model"), '[{?}, {"tensor"}]'),
    ],
)
def test_a_dim_without_an_axis_in_a_spec_alone_is_whole(spec, lowered_spec):
    text = lowered(partial(Activations, say=lambda x: jax.lax.with_sharding_constraint(x, spec)), BOTH)
    assert f"sharding_constraint %{{}} <@mesh, {lowered_spec}>" in re.sub(r"%\w+", "%{}", text)


@pytest.mark.parametrize(
    ("names", "lowered_spec"),
    [
        (("batch", "mlp", "mlp"), '[{"data", "fsdp"}, {"tensor"}, {?}]'),
        (("batch", "unmodeled", "unmodeled"), '[{"data", "fsdp"}, {?}, {?}]'),
        (("batch", None, None), '[{"data", "fsdp"}, {}, {}]'),
    ],
)
@pytest.mark.parametrize("constrain", [nn.with_logical_constraint, partitioning.with_sharding_constraint])
def test_of_dims_of_one_name_the_first_is_split(constrain, names, lowered_spec):
    text = lowered(partial(Activations, say=lambda x: constrain(x.reshape(-1, 8, 4), names).reshape(x.shape)), BOTH)
    assert f"sharding_constraint %{{}} <@mesh, {lowered_spec}>" in re.sub(r"%\w+", "%{}", text)


@pytest.mark.parametrize("axes", [("data", "fsdp"), ("fsdp", "data")])
def test_a_spec_that_names_two_axes_of_examples_means_each_by_itself(axes):
    text = lowered(partial(Activations, say=lambda x: jax.lax.with_sharding_constraint(x, P(*axes))), BOTH)
    assert f'[{{"{axes[0]}"}}, {{"{axes[1]}"}}]' in text


@pytest.mark.parametrize("way", ["spec", "out_sharding", "rules in the call", "jit out_shardings", "device_put"])
def test_an_axis_that_the_mesh_does_not_have_is_refused_with_the_way_out(way):
    said = {
        "spec": lambda x: jax.lax.with_sharding_constraint(x, P("data", "mp")),
        "out_sharding": lambda x: replaced_axes(x, "data", "mp"),
        "rules in the call": lambda x: in_call(nn.logical_axis_rules, (("columns", "mp"),), x, (None, "columns")),
        "jit out_shardings": lambda x: jax.jit(lambda x: x * 2, out_shardings=P("data", "mp"))(x),
        "device_put": lambda x: jax.device_put(x, NamedSharding(own_mesh("data", "mp"), P("data", "mp"))),
    }[way]
    with pytest.raises(JaxparError, match=r"'mp' is no axis of the mesh[\s\S]*rules=\{\"mp\": \"tensor\"\}"):
        lowered(partial(Activations, say=said), BOTH)
    mapped = jp.Parallel(data=2, fsdp=2, tensor=2, rules={"mp": "tensor"})
    assert '{"tensor"}]' in lowered(partial(Activations, say=said), mapped)


def test_rules_around_mean_one_thing_for_parameters_and_activations():
    crossed = (("batch", "data"), ("embed", "model"), ("mlp", None))
    model = partial(Activations, say=lambda x: nn.with_logical_constraint(x, ("batch", "embed")))
    with nnx.logical_axis_rules(crossed):
        layout = jp.compose(model, BOTH)
        step = jp.train_step(layout, loss, optax.sgd(0.1))
        assert '[{"data", "fsdp"}, {"tensor"}]' in step.lower(step.abstract(), {"x": X}).as_text()
    plain = jp.train_step(jp.compose(model, BOTH), loss, optax.sgd(0.1))
    with nnx.logical_axis_rules(crossed), pytest.raises(JaxparError, match=r"jp\.compose inside of the same context"):
        plain.lower(plain.abstract(), {"x": X})


def both_sides(x, mesh):
    """Returns x by a function of each device's rows, and their mean over all devices."""

    def rows(x):
        return x + jax.lax.pmean(jnp.mean(x), "data")

    return jax.shard_map(rows, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("flax", ["nnx", pytest.param("linen", marks=pytest.mark.slow)])
def test_shard_map_on_the_authors_mesh_runs_on_the_steps(flax):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    models = {"nnx": Activations, "linen": LinenActivations}
    losses = []
    for say in (partial(both_sides, mesh=mesh), lambda x: x + jnp.mean(x)):
        model = partial(models[flax], say=say) if flax == "nnx" else jp.from_linen(LinenActivations(say), X)
        step = jp.train_step(jp.compose(model, jp.Parallel(data=8)), loss, optax.sgd(0.1))
        _, metrics = step(jp.init_state(step.layout, optax.sgd(0.1)), {"x": X})
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_shard_map_on_another_mesh_is_refused_with_the_way_out():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    with pytest.raises(
        JaxparError, match=r"own with data=8, and the mesh of the step has data=2, [\s\S]*without mesh="
    ):
        lowered(partial(Activations, say=partial(both_sides, mesh=mesh)), BOTH)


def test_a_box_of_a_class_of_the_users_keeps_its_names():
    class Box(meta.Partitioned):
        pass

    assert stored(linen(boxed(Box, ("tensor", None)))()) == ROWS


@pytest.mark.parametrize("rules", [{}, {"tp": "tensor"}])
def test_an_axis_of_another_mesh_that_leaves_tensor_a_bias_alone_is_refused_with_its_rule(rules):
    """Linen's bias takes its names from its use, so that tensor=4 split a bias, and no matrix, without a word."""

    class Author(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.lecun_normal()
            x = nn.relu(nn.Dense(64, kernel_init=nn.with_partitioning(init, (None, "tp")))(x))
            return nn.Dense(16, kernel_init=nn.with_partitioning(init, ("tp", None)))(x)

    model = jp.from_linen(Author(), jnp.zeros((8, 16)))
    if rules:
        placed = jp.compose(model, jp.Parallel(tensor=4, rules=rules), jax.devices()[:4]).placements
        assert all("tensor" in placed[f"Dense_{n}/kernel"].used for n in (0, 1))
        return
    with pytest.raises(JaxparError, match=r"tensor=4 splits only Dense_0/bias[\s\S]*rules=\{'tp': 'tensor'\}"):
        jp.compose(model, jp.Parallel(tensor=4), jax.devices()[:4])
