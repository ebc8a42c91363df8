"""Mixtures of others, unedited: their experts are read by their use, cut over `expert`, and train as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_loop import train
from published import EXAMPLES
from published.plain import STEPS, plainly
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.units import show_count

OPTIMIZER = optax.sgd(0.3, momentum=0.9)


class Sorted(nnx.Module):
    """Tokens sorted by expert, and ragged matmuls: dropless, as in MegaBlocks."""

    def __init__(self, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.3)
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.router = nnx.Linear(16, 4, use_bias=False, rngs=rngs)
        self.up = nnx.Param(normal(rngs.params(), (4, 16, 32)))
        self.down = nnx.Param(normal(rngs.params(), (4, 32, 16)))
        self.head = nnx.Linear(16, 32, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        flat = x.reshape(-1, 16)
        weights, choices = jax.lax.top_k(jax.nn.softmax(self.router(flat)), 2)
        order = jnp.argsort(choices.reshape(-1), stable=True)
        sizes = jnp.bincount(choices.reshape(-1), length=4)
        h = jax.lax.ragged_dot(flat[order // 2], self.up[...], sizes)
        y = jax.lax.ragged_dot(nnx.gelu(h), self.down[...], sizes)
        y = jnp.zeros((len(order), 16)).at[order].set(y).reshape(-1, 2, 16)
        return self.head(x + (y * weights[..., None]).sum(1).reshape(x.shape))


class Vmapped(nnx.Module):
    """Experts are modules that `nnx.vmap` makes; all compute all tokens, and the router weighs them."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=0, out_axes=0)
        def experts(rngs):
            return nnx.Linear(16, 16, rngs=rngs)

        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.router = nnx.Linear(16, 4, use_bias=False, rngs=rngs)
        self.up, self.down = experts(rngs), experts(rngs)
        self.head = nnx.Linear(16, 32, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        shared = nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None), out_axes=0)
        each = nnx.vmap(lambda expert, x: expert(x), in_axes=(0, 0), out_axes=0)
        y = each(self.down, nnx.relu(shared(self.up, x)))
        return self.head(x + jnp.einsum("ebsd,bse->bsd", y, jax.nn.softmax(self.router(x))))


class Interleaved(nnx.Module):
    """Gates and values of experts lie between each other, as in gpt-oss, and the halves of the head are unpacked."""

    def __init__(self, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.3)
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.router = nnx.Linear(16, 4, use_bias=False, rngs=rngs)
        self.up = nnx.Param(normal(rngs.params(), (4, 16, 64)))
        self.down = nnx.Param(normal(rngs.params(), (4, 32, 16)))
        self.head = nnx.Param(normal(rngs.params(), (2, 16, 32)))

    def __call__(self, tokens):
        x = self.embed(tokens)
        h = jnp.einsum("bsd,edf->bsef", x, self.up[...])
        h = nnx.silu(h[..., ::2]) * h[..., 1::2]
        y = jnp.einsum("bsef,efd,bse->bsd", h, self.down[...], jax.nn.softmax(self.router(x)))
        first, second = self.head[...]
        return (x + y) @ first + (x - y) @ second


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])
    return losses.sum(), losses.size


def tokens():
    return {"tokens": np.random.default_rng(0).integers(1, 32, (16, 9)).astype(np.int32)}


def trained(model, loss, optimizer, batch, sizes):
    layout = jp.compose(model, jp.Parallel(**sizes))
    step, state, losses = jp.train_step(layout, loss, optimizer), jp.init_state(layout, optimizer), []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return layout, losses, state


def experts_of(layout):
    """Paths of parameters whose dim 0 is cut over `expert`."""
    return {path for path, place in layout.placements.items() if place.whole[:1] == ("expert",)}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*times its share")  # a dense dispatch computes slots of all rows on each device
@pytest.mark.parametrize("sizes", [{"expert": 4, "data": 2}, {"expert": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_a_mixture_of_einsums_is_cut_by_experts(sizes):
    expected, params, _ = plainly("mixtral")
    example = EXAMPLES["mixtral"]
    layout, losses, state = trained(example.model, example.loss, example.optimizer, example.numbers(), sizes)
    assert experts_of(layout) == {f"block_sparse_moe/{name}" for name in ("w1", "w2", "w3")}
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_arrays(state.params, params)


class Unnamed(nnx.Module):
    """Large matrices without names, around experts that have them."""

    def __init__(self, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.3)
        self.embed = nnx.Embed(256, 64, rngs=rngs)
        self.router = nnx.Linear(64, 4, use_bias=False, rngs=rngs)
        self.up = nnx.Param(normal(rngs.params(), (4, 64, 64)), out_sharding=("expert", "embed", "mlp"))
        self.head = nnx.Linear(64, 256, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        weights, choices = jax.lax.top_k(jax.nn.softmax(self.router(x)), 2)
        y, _ = jp.mixture(lambda up, x: nnx.gelu(x @ up), self.up[...], x, choices, weights)
        return self.head(x + y + x[:, :0].sum(1, keepdims=True))


@pytest.mark.nightly
def test_a_model_without_names_around_its_experts_trains_as_on_one_device():
    batch, losses = tokens(), []
    for sizes, devices in (({"expert": 4, "data": 2}, None), ({}, jax.devices()[:1])):
        layout = jp.compose(Unnamed, jp.Parallel(**sizes), devices)
        step, state = jp.train_step(layout, loss, OPTIMIZER), jp.init_state(layout, OPTIMIZER)
        losses.append(float(step(state, batch)[1]["loss"]))
        assert "expert divides no dim" not in layout.explain()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_what_is_unpacked_and_stacked_is_read_through():
    """Names under `tensor` are those of a model that slices and joins: of heads, and of a gated layer."""

    class Unpacked(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            normal = nnx.initializers.normal(0.3)
            self.embed = nnx.Embed(32, 16, rngs=rngs)
            self.qkv = nnx.Param(normal(rngs.params(), (3, 16, 4, 4)))
            self.out = nnx.Param(normal(rngs.params(), (4, 4, 16)))
            self.gates = nnx.Param(normal(rngs.params(), (2, 16, 64)))
            self.down = nnx.Linear(64, 16, use_bias=False, rngs=rngs)
            self.head = nnx.Linear(16, 32, use_bias=False, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            q, k, v = jnp.einsum("bsd,ndhk->nbshk", x, self.qkv[...])
            q, k = (jnp.stack([-a[..., 1::2], a[..., ::2]], axis=-1).reshape(a.shape) for a in (q, k))
            x = x + jnp.einsum("bshk,hkd->bsd", jp.attention(q, k, v, causal=True), self.out[...])
            gate, up = jnp.einsum("bsd,ndf->nbsf", x, self.gates[...])
            return self.head(x + self.down(nnx.silu(gate) * up))

    batch = tokens()
    model = jp.from_nnx(Unpacked, batch["tokens"][:1, :-1])
    layout, losses, _ = trained(model, loss, OPTIMIZER, batch, {"tensor": 4, "data": 2})
    specs = {path: tuple(layout.placements[path].whole) for path in ("qkv", "out", "gates", "down/kernel")}
    expected = {"qkv": (None, None, "tensor"), "out": ("tensor",), "gates": (None, None, "tensor")}
    assert specs == expected | {"down/kernel": ("tensor",)}
    np.testing.assert_allclose(losses, train(model, Unpacked, loss, OPTIMIZER, batch)[0], rtol=1e-5)


def test_a_rule_may_name_an_axis_of_size_one():
    rules = {"devices": "expert"}
    layout = jp.compose(Unnamed, jp.Parallel(rules=rules), jax.devices()[:1])
    assert not any(layout.placements["up"].whole)
    with pytest.raises(jp.JaxparError, match="'exprt'"):
        jp.compose(Unnamed, jp.Parallel(rules={"devices": "exprt"}), jax.devices()[:1])


class Separate(nnx.Module):
    """Each expert is a module of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.router = nnx.Linear(16, 4, use_bias=False, rngs=rngs)
        self.experts = nnx.List(nnx.Linear(16, 16, rngs=rngs) for _ in range(4))

    def __call__(self, tokens):
        x = self.embed(tokens)
        weights = jax.nn.softmax(self.router(x))
        y = jnp.stack([expert(x) for expert in self.experts], axis=-1)
        return self.embed.attend(x + (y * weights[..., None, :]).sum(-1))


@pytest.mark.parametrize(
    ("kind", "fix"), [(Separate, r"one array \[experts, \.\.\.\]"), (Sorted, r"paths=.*jp\.from_nnx\(")]
)
def test_the_way_out_without_experts_fits_the_arrays(kind, fix):
    with pytest.raises(jp.JaxparError, match=rf"has no experts[\s\S]*fsdp=4; or .*{fix}"):
        jp.compose(kind, jp.Parallel(expert=4, data=2))


@pytest.mark.nightly
def test_the_first_step_says_what_a_foreign_dispatch_costs_and_what_would_cost_less():
    batch = tokens()
    model = jp.from_nnx(Sorted, batch["tokens"][:1, :-1])
    with pytest.warns(UserWarning, match=r"times its share of [\s\S]*fix: jp\.mixture\(expert, params") as warned:
        trained(model, loss, OPTIMIZER, batch, {"expert": 4, "data": 2})
    assert len(warned) == 1
    assert str(warned[0].message).count("jp.mixture") == 1


@pytest.mark.nightly
def test_the_first_step_says_that_xla_runs_ragged_matmuls_for_all_experts():
    layout = jp.compose(Sorted, jp.Parallel(fsdp=8))
    step, state = jp.train_step(layout, loss, OPTIMIZER), jp.init_state(layout, OPTIMIZER)
    with pytest.warns(UserWarning, match="times its share") as warned:
        step(state, tokens())
    # of a token: its two choices of experts with two matrices each, and the router and the head, forward and backward
    chosen, others = 2 * 2 * 16 * 32, 16 * 4 + 16 * 32
    share, ragged = (6 * 16 * 8 / 8 * flop for flop in (chosen + others, 3 * chosen))
    message = str(warned[0].message)
    assert f"its share of {show_count(share)};" in message
    assert f"; {show_count(ragged)} are of jax.lax.ragged_dot" in message
    assert message.partition("fix: ")[2].startswith("jp.mixture(")


class InTurn(Sorted):
    """A Python loop over the same experts, each of which computes all tokens, as in Tunix's Qwen 3."""

    def __call__(self, tokens):
        x = y = self.embed(tokens)
        weights = jax.nn.softmax(self.router(x))
        for i in range(4):
            y = y + weights[..., i : i + 1] * (nnx.relu(x @ self.up[...][i]) @ self.down[...][i])
        return self.head(y)


@pytest.mark.spread(0)
@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_a_loop_over_experts_gathers_their_stacks_once_over_fsdp(remat):
    layout = jp.compose(InTurn, jp.Parallel(fsdp=8))
    step = jp.train_step(layout, loss, OPTIMIZER, remat=remat)
    ledger = jp.inspect(step, tokens()).ledger
    gathers = [each for each in ledger if each.kind == "all-gather" and {"up", "down"} & {*each.parameters}]
    passes = 2 if remat == "full" else 1
    assert sum(each.payload * each.times for each in gathers) == passes * 2 * 4 * 16 * 32 * 4
    _, losses, _ = trained(InTurn, loss, OPTIMIZER, tokens(), {"fsdp": 8})
    np.testing.assert_allclose(losses, train(InTurn, InTurn, loss, OPTIMIZER, tokens())[0], rtol=1e-5)


def test_experts_that_a_loop_takes_one_by_one_are_warned_of():
    paths = {"up": ("expert", "embed", "mlp"), "down": ("expert", "mlp", "embed")}
    step = jp.train_step(jp.compose(InTurn, jp.Parallel(expert=4, data=2, paths=paths)), loss, OPTIMIZER)
    with pytest.warns(
        UserWarning, match=r"takes the 4 experts of up one by one[\s\S]*fix: expert=1 and fsdp=4"
    ) as warned:
        step.lower(step.abstract(), tokens())
    assert len(warned) == 1


def test_a_rule_that_splits_more_than_experts_over_their_axis_is_warned_of():
    """So Tunix names the dims that FSDP shards, those of experts too."""

    class Named(Unnamed):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            self.up.set_metadata(out_sharding=("fsdp", None, "tp"))
            self.head.kernel.set_metadata(out_sharding=("fsdp", "tp"))

    rules = {"fsdp": "expert", "tp": None}
    step = jp.train_step(jp.compose(Named, jp.Parallel(expert=4, data=2, rules=rules)), loss, OPTIMIZER)
    with pytest.warns(UserWarning, match=r"splits dim 0 of \S+ \(\d+\) and dim 0 of \S+ \(\d+\), which are not all"):
        step.lower(step.abstract(), tokens())


class Biased(nnx.Module):
    """Each expert has biases, and all compute all tokens; the router has one too, which is no expert's."""

    def __init__(self, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.3)
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.router = nnx.Linear(16, 4, rngs=rngs)
        self.up, self.up_bias = (nnx.Param(normal(rngs.params(), shape)) for shape in ((4, 16, 64), (4, 64)))
        self.down, self.down_bias = (nnx.Param(normal(rngs.params(), shape)) for shape in ((4, 64, 16), (4, 16)))
        self.head = nnx.Linear(16, 32, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        h = nnx.relu(jnp.einsum("bsd,edf->bsef", x, self.up[...]) + self.up_bias[...])
        y = jnp.einsum("bsef,efd->bsed", h, self.down[...]) + self.down_bias[...]
        return self.head(x + jnp.einsum("bsed,bse->bsd", y, jax.nn.softmax(self.router(x))))


@pytest.mark.parametrize(
    ("kind", "stacks"),
    [
        (Vmapped, {"up/kernel", "up/bias", "down/kernel", "down/bias"}),
        (Biased, {"up", "up_bias", "down", "down_bias"}),
        (Interleaved, {"up", "down"}),
    ],
)
def test_matrices_and_biases_of_experts_are_read_by_their_use(kind, stacks):
    model = jp.from_nnx(kind, tokens()["tokens"][:1, :-1])
    assert experts_of(jp.compose(model, jp.Parallel(expert=4, data=2))) == stacks


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*times its share")  # XLA has no partitioned ragged matmul: all rows on each device
@pytest.mark.parametrize("kind", [Sorted, Vmapped, Interleaved, Biased])
def test_other_mixtures_are_cut_by_experts(kind):
    batch = tokens()
    model = jp.from_nnx(kind, batch["tokens"][:1, :-1])
    layout, losses, state = trained(model, loss, OPTIMIZER, batch, {"expert": 4, "data": 2})
    assert experts_of(layout) >= ({"up/kernel", "down/kernel"} if kind is Vmapped else {"up", "down"})
    expected = train(model, kind, loss, OPTIMIZER, batch)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    for value, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(np.asarray(value), other, atol=2e-5)
