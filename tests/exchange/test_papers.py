"""Each exchange beside its paper: parameters of every replica after every step, and a numpy loop of the equations.

    examples ─► jaxpar's own step on simulated devices ──────────────────► parameters [replica, 160], float32
           └──► gradient in closed form ─► the paper's lines, in float64 ──► the same to 1e-5 of the largest

The numpy loops are written from the papers. Where jaxpar departs from its paper, the line or the docstring has a note
that begins with `jaxpar:`. Draws are handled in one of three ways, which the loop's docstring names: both sides draw
from one table in place of `jax.random`; or numpy reads the draw off jaxpar's metrics or memory and checks that it is
one that the paper allows; or, in the last test, the mean of many draws is held to Hoeffding's bound.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some

import jaxpar as jp
from jaxpar.exchange.averaging.streaming import CODES
from jaxpar.exchange.clock.base import Exponential, WorkerTimes
from jaxpar.exchange.clock.methods import Backup, Stale
from jaxpar.exchange.clock.parameter_servers import Downpour, TwoLevels
from jaxpar.exchange.population.population import Pbt
from jaxpar.train import virtual_clock

RATE, BLOCK, WORKERS = 0.1, 8, 4
SPLIT = 16 * 8  # elements of the first matrix, and in a vector of parameters those of the second after them
CODE_SETTINGS = dict(
    smallest=8, block=BLOCK
)  # both matrices are mean_of_codes; a block is 8 elements in a row of either
INNER_RATE, DECAY = 1e-2, 0.1  # AdamW's rate and weight decay
SGD, ADAMW = optax.sgd(RATE), optax.adamw(INNER_RATE, weight_decay=DECAY)


# the model, and its gradient in closed form


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Param(0.3 * jax.random.normal(rngs.params(), (16, 8)))
        self.output = nnx.Param(0.3 * jax.random.normal(rngs.params(), (8, 4)))

    def __call__(self, x):
        return jnp.tanh(x @ self.hidden[...]) @ self.output[...]


def loss(model, batch):
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2) / 2, jnp.float32(len(batch["x"]))


def make_batch(number, size):
    x = np.random.default_rng((7, number)).normal(size=(size, 20)).astype(np.float32)
    return {"x": x[:, :16], "y": x[:, 16:]}


def matrices(x):
    return x[:SPLIT].reshape(16, 8), x[SPLIT:].reshape(8, 4)


def factors_of(x, batch):
    """Returns of each example the pairs (u, v) whose outer products are its gradients, and its loss."""
    first, second = matrices(x)
    inputs = batch["x"].astype(float)
    hidden = np.tanh(inputs @ first)
    error = hidden @ second - batch["y"]
    return [(inputs, error @ second.T * (1 - hidden**2)), (hidden, error)], (error**2).sum(-1) / 2


def closed_gradient(x, batch):
    """Returns the gradient of the mean over examples of |tanh(a U) V - b|^2 / 2 at x = (U, V). Shape [160]."""
    pairs, _ = factors_of(x, batch)
    return np.concatenate([(u.T @ v).ravel() for u, v in pairs]) / len(batch["x"])


@dataclass
class Problem:
    """What a numpy loop is given.

    Attributes:
      start: Parameters with which all begin. Shape [160].
      replicas: How many.
      examples: Of each replica, in a step.
      draws: Of jaxpar's newest step, by name.
      memory: What numpy remembers after a step, if anything, as a gradient. Shape [replica, 160].
    """

    start: np.ndarray
    replicas: int = WORKERS
    examples: int = 4
    draws: dict[str, Any] = field(default_factory=dict)
    memory: np.ndarray | None = None

    def batch(self, step):
        return make_batch(step, self.replicas * self.examples)

    def local_batch(self, step, replica):
        places = slice(replica * self.examples, (replica + 1) * self.examples)
        return {name: value[places] for name, value in self.batch(step).items()}

    def gradients(self, x, step):
        """Returns each replica's gradient of its own examples. Shape [replica, 160]."""
        x = np.broadcast_to(x, (self.replicas, x.shape[-1]))
        return np.stack([closed_gradient(x[r], self.local_batch(step, r)) for r in range(self.replicas)])

    def copies(self):
        return np.tile(self.start, (self.replicas, 1))


# replicas that differ


def local_sgd(problem, every=3):
    """arXiv:1808.07217, algorithm 1: H local steps of SGD, then all take the mean of their models."""
    x = problem.copies()
    for t in count(1):
        x = x - RATE * problem.gradients(x, t)
        if t % every == 0:
            x = np.tile(x.mean(0), (problem.replicas, 1))
        yield x


def adamw(x, g, moments, t):
    """arXiv:1711.05101, algorithm 2, lines 6 to 12, with the decay times the rate: x, (m, v) after step t."""
    m, v = 0.9 * moments[0] + 0.1 * g, 0.999 * moments[1] + 0.001 * g**2
    m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
    return x - INNER_RATE * (m_hat / (np.sqrt(v_hat) + 1e-8) + DECAY * x), (m, v)


def nesterov(x, delta, trace):
    """arXiv:2311.08105, section 2: the outer optimizer is Nesterov's momentum, rate 0.7 and momentum 0.9."""
    trace = 0.9 * trace + delta
    return x - 0.7 * (delta + 0.9 * trace), trace


def diloco(problem, every=3):
    """arXiv:2311.08105, algorithm 1: AdamW by each worker for H steps; outer gradient mean(theta - theta_i); OuterOpt.

    The moments of AdamW stay with their worker from one round to the next.
    """
    outer, trace, x, moments = problem.start, 0, problem.copies(), (0, 0)
    for t in count(1):
        x, moments = adamw(x, problem.gradients(x, t), moments, t)
        if t % every == 0:
            outer, trace = nesterov(outer, (outer - x).mean(0), trace)
            x = np.tile(outer, (problem.replicas, 1))
        yield x


def streaming(problem, code=lambda delta, counts: delta, every=4, delay=2, alpha=0.25):
    """arXiv:2501.18512, algorithm 2: each fragment p is sent every H steps from t_p on, and arrives tau steps later.

    Sent is the mean over replicas of Delta = theta_p - theta_m,p; theta_p <- OuterOpt(theta_p, Delta); and a replica
    takes alpha theta_m,p + (1 - alpha) theta_p of what it is when Delta arrives. Two fragments: the two matrices.
    jaxpar: codes of 4 bits are QSGD's, where the paper has floats E3M0; and the mean is coded once more.
    """
    outer, trace, x, moments, flight = problem.start.copy(), np.zeros(160), problem.copies(), (0, 0), {}
    for t in count(1):
        x, moments = adamw(x, problem.gradients(x, t), moments, t)
        for part, first, counts in ((slice(0, SPLIT), 2, (4,)), (slice(SPLIT, 160), 4, (1,))):
            if (t - first) % every == 0:
                flight[first] = code(code((outer - x)[:, part], counts).mean(0), counts)
            if (t - delay - first) % every == 0 and first in flight:
                outer[part], trace[part] = nesterov(outer[part], flight.pop(first), trace[part])
                x[:, part] = alpha * x[:, part] + (1 - alpha) * outer[part]
        yield x


def easgd(problem, every=2, alpha=0.25, beta=0.5):
    """arXiv:1412.6651, equations 5 and 6, every tau steps."""
    x, center = problem.copies(), problem.start
    for t in count(1):
        x = x - RATE * problem.gradients(x, t)  # jaxpar: the gradient step before the elastic one, not in the same sum
        if t % every == 0:
            x, center = x - alpha * (x - center), (1 - beta) * center + beta * x.mean(0)
        yield x


def gossip(problem, mix):
    """arXiv:1705.09056, algorithm 1: a weighted mean over neighbours (line 4), and a gradient step (line 5)."""
    x = problem.copies()
    for t in count(1):
        x = mix(x - RATE * problem.gradients(x, t))  # jaxpar: adapts, then combines
        yield x


def ring(x):
    """W_ij = 1/3 for a worker and its two neighbours."""
    return (x + np.roll(x, 1, 0) + np.roll(x, -1, 0)) / 3


def torus(x):
    """W_ij = 1/5 for a worker and its four neighbours on a grid of 2 x 4."""
    grid = x.reshape(2, 4, -1)
    return (grid + sum(np.roll(grid, by, axis) for by in (1, -1) for axis in (0, 1))).reshape(x.shape) / 5


def exponential(x):
    """arXiv:1811.10792, appendix A: in a static exponential graph worker i hears i - 1, i - 2, i - 4."""
    return sum(np.roll(x, by, 0) for by in (0, 1, 2, 4)) / 4


def ensemble(problem):
    """Workers that never meet: SGD by each."""
    x = problem.copies()
    for t in count(1):
        x = x - RATE * problem.gradients(x, t)
        yield x


# replicas that are equal: gradients as codes. jaxpar codes the mean once more, and each piece of it on one replica


def mean_of_codes(problem, code):
    """arXiv:1610.02132, algorithm 1, and arXiv:1705.07878, algorithm 1: workers send codes, all take the mean of them.

    `code` is of vectors [replica, 160] by all workers, or [160] by the replicas that each have a piece of the mean.
    """
    x = problem.start
    for t in count(1):
        x = x - RATE * code(code(problem.gradients(x, t)).mean(0))  # jaxpar: the mean is coded once more
        yield x


def error_feedback(problem, code, code_mean=None):
    """arXiv:1901.09847, algorithm 1 (one worker), and arXiv:1809.07599, algorithm 2 (several, with a memory each).

    p_t = gamma g_t + e_t; Delta_t = C(p_t); x_{t+1} = x_t - mean(Delta_t); e_{t+1} = p_t - Delta_t.
    """
    x, e, e_mean = problem.start, 0, 0
    for t in count(1):
        p = RATE * problem.gradients(x, t) + e
        delta = code(p)
        e = p - delta
        mean = delta.mean(0) + e_mean
        update = (code_mean or code)(mean)  # jaxpar: the mean is coded once more, and its error has a memory too
        e_mean, x, problem.memory = mean - update, x - update, e / RATE
        yield x


def sparcml(problem, k):
    """arXiv:1802.08021, algorithm 1 without its quantization: a memory for each worker, and an exact sum.

    acc = eps + alpha grad; eps = acc - TopK(acc); v = v - mean(TopK(acc)).
    """
    return error_feedback(problem, partial(largest, k=k), lambda mean: mean)


def bfloat16(v):
    """Rounds to the nearest number of 8 significant bits, halves to even (IEEE 754, section 4.3.1)."""
    bits = np.asarray(v, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32).astype(float)


def blocks(v):
    return v.reshape(*v.shape[:-1], -1, BLOCK)


def sign(p):
    """arXiv:1901.09847, algorithm 1: |p|_1 / d sign(p)."""
    scale = np.abs(blocks(p)).mean(-1, keepdims=True)  # jaxpar: of each block
    return (scale * np.sign(blocks(p))).reshape(p.shape)


def largest(p, k=2):
    """arXiv:1809.07599, definition 2.2: top_k keeps the k largest magnitudes, and is zero elsewhere."""
    least = np.sort(np.abs(blocks(p)))[..., -k:].min(-1, keepdims=True)  # jaxpar: of each block
    return np.where(np.abs(blocks(p)) >= least, blocks(p), 0).reshape(p.shape)


def quantize(v, counts=(4, 1), levels=7):
    """arXiv:1610.02132, section 3.1: Q_s(v_i) = |v| sgn(v_i) xi_i, where xi_i is l / s or (l + 1) / s.

    The probability of the latter is s |v_i| / |v| - l. Draws: one table for both sides.
    """
    norm = np.abs(blocks(v)).max(-1, keepdims=True)  # jaxpar: of each block, and its maximum (the paper's section 5)
    r = levels * np.abs(blocks(v)) / norm
    u = blocks(vector_of_uniforms(v.ndim, counts))
    up = np.where(blocks(v) > 0, 1 - u, u) < r - np.floor(r)  # which end of [0, 1] raises is a convention
    return (norm * np.sign(blocks(v)) * (np.floor(r) + up) / levels).reshape(v.shape)


def ternarize(g):
    """arXiv:1705.07878, equations 1 to 4: s sign(g) b, with s = max |g| and P(b = 1) = |g| / s. Draws: one table."""
    s = np.abs(blocks(g)).max(-1, keepdims=True)  # jaxpar: of each block; and gradients are not clipped before
    b = blocks(vector_of_uniforms(g.ndim, (4, 1))) < np.abs(blocks(g)) / s
    return (s * np.sign(blocks(g)) * b).reshape(g.shape)


def random_k(problem, k=2):
    """arXiv:1809.07599, algorithm 2 with rand_k of definition 2.2: k coordinates of each block, drawn at random.

    Draws: a coordinate that was sent is one of which nothing is remembered; all replicas have the same (jaxpar), k in
    each block, and others in each step.
    """
    masks = set()

    def code(p):
        mask, *others = problem.draws["memory"] == 0
        assert (mask == others).all()
        assert (blocks(mask).sum(-1) == k).all()
        masks.add(mask.tobytes())
        return np.where(mask, p, 0)

    for t, x in enumerate(error_feedback(problem, code), 1):
        assert len(masks) == t
        yield x


def power_sgd(problem, rank=2):
    """arXiv:1905.13727, algorithms 1 and 2: P = mean(M Q), orthogonalized; Q = mean(M^T P); the gradient is P Q^T.

    M is a worker's gradient and its memory, from which P (M^T P)^T goes (jaxpar: each worker's own Q, not the mean).
    The first Q is drawn from one table. Momentum is the optimizer's. The warm start, Q, is the last one: jaxpar has
    another basis of its columns, which gives the same P P^T.
    """
    x, e = problem.start, np.zeros((problem.replicas, 160))
    q = [normals((1, columns, rank))[0] for columns in (8, 4)]
    for t in count(1):
        total, x = e + problem.gradients(x, t), x.copy()
        for i, part in enumerate((slice(0, SPLIT), slice(SPLIT, 160))):
            m = total[:, part].reshape(problem.replicas, -1, len(q[i]))
            p, _ = np.linalg.qr((m @ q[i]).mean(0))
            local_q = np.swapaxes(m, 1, 2) @ p
            q[i] = local_q.mean(0)
            e[:, part] = (m - p @ np.swapaxes(local_q, 1, 2)).reshape(problem.replicas, -1)
            x[part] -= RATE * (p @ q[i].T).ravel()
        problem.memory = e
        yield x


def factors(problem):
    """arXiv:1409.5705, section 3: each worker broadcasts u and v of each example; all add up the products u v^T."""
    x = problem.start
    for t in count(1):
        pairs, _ = zip(*(factors_of(x, problem.local_batch(t, r)) for r in range(problem.replicas)), strict=True)
        total = np.zeros(160)
        for worker in pairs:
            for example in range(problem.examples):
                total += np.concatenate([np.outer(u[example], v[example]).ravel() for u, v in worker])
        x = x - RATE * total / (problem.replicas * problem.examples)
        yield x


# populations

RATES = (0.02, 0.3, 0.05, 0.1, 0.2, 0.01)


def pbt(problem, every=3, few=2):
    """arXiv:1711.09846, algorithm 1: step, eval, and when a member is ready exploit, explore.

    Exploit is truncation selection (section 4.1): the worst copy weights and settings of one that is drawn among the
    best; explore is a factor 0.8 or 1.2. Draws: read off the metrics, and checked. What is evaluated is the mean
    training loss since the last copying (jaxpar).
    """
    h, x, score, places = np.array(RATES), np.tile(problem.start, (len(RATES), 1)), 0, np.arange(len(RATES))
    for t in count(1):
        batch = problem.batch(t)
        score = score + np.array([factors_of(member, batch)[1].mean() for member in x])
        x = x - h[:, None] * np.stack([closed_gradient(member, batch) for member in x])
        if t % every == 0:
            best, worst = score.argsort()[:few], score.argsort()[-few:]
            source = problem.draws["from"]
            factor = np.round(problem.draws["learning_rate"] / h[source], 5)
            copies = np.isin(places, worst)
            assert np.isin(source[copies], best).all()
            assert np.isin(factor[copies], (0.8, 1.2)).all()
            assert (source[~copies] == places[~copies]).all()
            assert (factor[~copies] == 1).all()
            x, h, score = x[source], factor * h[source], 0
        yield x


# one table of draws in place of `jax.random`


def uniforms(shape, replica):
    return np.random.default_rng((replica, *shape)).uniform(size=shape).astype(np.float32)


def normals(shape):
    return np.random.default_rng((9, *shape)).normal(size=shape).astype(np.float32)


def vector_of_uniforms(dims, counts):
    """Returns draws of each replica for all its rows [replica, n], or of each replica for its piece of a mean [n].

    Args:
      dims: 2 or 1.
      counts: Of each matrix, how many blocks a row has, which is a quarter of it.
    """
    shape = (WORKERS if dims == 2 else 1, sum(counts), BLOCK)
    draws = np.stack([uniforms(shape, r) for r in range(WORKERS)])  # [replica, row, block, BLOCK]
    draws = draws if dims == 2 else draws.swapaxes(0, 1)
    parts = np.split(draws, np.cumsum(counts)[:-1], axis=2)
    rows = np.concatenate([x.reshape(len(x), -1) for x in parts], axis=1)
    return rows if dims == 2 else rows[0]


@pytest.fixture
def fixed_draws(monkeypatch):
    """Returns a function, to be called after a model is initialized, that puts the table in place of `jax.random`."""
    code = dataclasses.replace(CODES["int4"], **CODE_SETTINGS)
    monkeypatch.setitem(CODES, "int4", code)  # streaming has no setting for which parameters are coded

    def uniform(key, shape):
        return jnp.asarray(np.stack([uniforms(shape, r) for r in range(WORKERS)]))[jax.lax.axis_index("data")]

    def patch():
        monkeypatch.setattr(jax.random, "uniform", uniform)
        monkeypatch.setattr(jax.random, "normal", lambda key, shape: jnp.asarray(normals(shape)))

    return patch


# every method, every step


@dataclass(frozen=True)
class Method:
    """A row: an exchange of jaxpar, and the numpy loop of its paper.

    Attributes:
      exchange: With small settings.
      loop: Yields parameters after each step, [replica, 160] or [160] of all.
      optimizer: Of each replica.
      replicas: Devices over `data`.
      examples: Of each replica, in a step.
      steps: How many are compared.
      fixed_draws: Whether both sides draw from one table.
    """

    exchange: jp.Exchange
    loop: Callable[[Problem], Iterator[np.ndarray]]
    optimizer: optax.GradientTransformation = SGD
    replicas: int = WORKERS
    examples: int = 4
    steps: int = 8
    fixed_draws: bool = False


MEMBER_SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)
GRAPHS = {"ring": ring, "torus": torus, "exponential": exponential}
METHODS = {
    "local": Method(jp.Exchange("local", every=3), local_sgd),
    "diloco": Method(jp.Exchange("diloco", every=3), diloco, ADAMW, steps=9),
    "streaming": Method(
        jp.Exchange("streaming", every=4, fragments=2, delay=2, blend=0.25), streaming, ADAMW, steps=12
    ),
    "streaming int4": Method(
        jp.Exchange("streaming", every=4, fragments=2, delay=2, blend=0.25, wire="int4"),
        partial(streaming, code=quantize), ADAMW, steps=12, fixed_draws=True,
    ),
    "easgd": Method(jp.Exchange("easgd", every=2, alpha=0.25, beta=0.5), easgd),
    **{f"gossip {graph}": Method(jp.Exchange("gossip", graph=graph), partial(gossip, mix=mix), replicas=8, examples=2)
       for graph, mix in GRAPHS.items()},
    "ensemble": Method(jp.Exchange("ensemble"), ensemble),
    "bf16": Method(jp.Exchange("bf16", **CODE_SETTINGS), partial(mean_of_codes, code=bfloat16), steps=5),
    **{f"qsgd {bits} bits": Method(
        jp.Exchange("qsgd", bits=bits, **CODE_SETTINGS),
        partial(mean_of_codes, code=partial(quantize, levels=2 ** (bits - 1) - 1)), fixed_draws=True,
    ) for bits in (4, 8)},
    "ternary": Method(
        jp.Exchange("ternary", **CODE_SETTINGS), partial(mean_of_codes, code=ternarize), fixed_draws=True
    ),
    "sign": Method(jp.Exchange("sign", **CODE_SETTINGS), partial(error_feedback, code=sign)),
    "topk": Method(jp.Exchange("topk", share=0.25, **CODE_SETTINGS), partial(error_feedback, code=largest)),
    "randomk": Method(jp.Exchange("randomk", share=0.25, **CODE_SETTINGS), random_k),
    "sparse": Method(jp.Exchange("sparse", share=0.125, **CODE_SETTINGS), partial(sparcml, k=1)),
    "sparse, dense sum": Method(jp.Exchange("sparse", share=0.25, **CODE_SETTINGS), partial(sparcml, k=2)),
    "powersgd": Method(jp.Exchange("powersgd", rank=2, smallest=8), power_sgd, fixed_draws=True),
    "factors": Method(jp.Exchange("factors", rank=2, smallest=8), factors, replicas=2, examples=2),
    "pbt": Method(
        Pbt(values={"learning_rate": RATES}, every=3, share=0.34), pbt, MEMBER_SGD, replicas=2, examples=8, steps=9
    ),
}  # fmt: skip


def vectors(tree):
    """Returns arrays [replica, ...] as vectors [replica, 160]."""
    return np.concatenate([np.asarray(x, float).reshape(len(x), -1) for x in jax.tree.leaves(tree)], axis=1)


def device_copies(tree):
    """Returns the copy that each device has of replicated arrays. Shape [device, 160]."""
    copies = [[shard.data for shard in x.addressable_shards] for x in jax.tree.leaves(tree)]
    return np.concatenate([np.stack(x).astype(float).reshape(len(x), -1) for x in copies], axis=1)


def difference(actual, target):
    """Returns the largest difference, relative to the largest number."""
    return np.abs(actual - target).max() / np.abs(target).max()


def draws_of(state, metrics):
    """Returns the random draws of a step of jaxpar, read from its state and its metrics."""
    draws = {"memory": vectors(state.exchange["lost"])} if "lost" in state.exchange else {}
    for name in ("from", "learning_rate"):
        if f"{name}/0" in metrics:
            draws[name] = np.array([metrics[f"{name}/{member}"] for member in range(len(RATES))])
    return draws


def differences(method, patch):
    """Returns the relative difference to the paper after each step, of parameters and of any error memory."""
    parallel = jp.Parallel(data=method.replicas, exchange=method.exchange)
    layout = jp.compose(lambda rngs: Net(rngs), parallel, jax.devices()[: method.replicas])
    step, state = jp.train_step(layout, loss, method.optimizer), jp.init_state(layout, method.optimizer)
    read = vectors if method.exchange.replicas_differ else device_copies
    problem = Problem(read(state.params)[0], method.replicas, method.examples)
    if method.fixed_draws:
        patch()
    loop, result = method.loop(problem), []
    for t in range(1, method.steps + 1):
        state, metrics = step(state, problem.batch(t))
        problem.draws = draws_of(state, metrics)
        actual, target = read(state.params), next(loop)
        assert len(actual) >= method.replicas
        result.append(difference(actual, np.broadcast_to(target, actual.shape)))
        if "memory" in problem.draws:
            result.append(difference(problem.draws["memory"], problem.memory))
    return result


@pytest.mark.parametrize(
    "name",
    some(METHODS, ["easgd", "gossip torus", "gossip exponential", "ensemble", "bf16", "ternary", "sign", "sparse"]),
)
def test_every_step_is_as_its_paper_says(name, fixed_draws):
    assert max(differences(METHODS[name], fixed_draws)) < 1e-5  # of float32; the largest is 3e-6, of powersgd


# on the virtual clock: when each update is made, and the parameters after it

STEPS = 24  # of a run, of whose updates as many are compared; the loops go on, where a run would end


def arrivals(start, finish):
    """Yields gradients in the order of their arrival: when, of which version, and which it is in the order of starts.

    Args:
      start: When each is begun. Shape [gradients, workers].
      finish: When each is applied, likewise.
    """
    order = sorted(np.ndindex(*start.shape), key=lambda place: (start[place], place[1]))
    for place in sorted(order, key=lambda place: finish[place]):
        yield finish[place], (finish <= start[place]).sum(), order.index(place)


def start_times(finish):
    """Returns when gradients are begun by workers who wait for nobody: each where the one before is finished."""
    return np.concatenate([np.zeros((1, finish.shape[1])), finish[:-1]])


def asynchronous(start, gradient, times):
    """Dean et al. 2012, section 4.1, and arXiv:1604.00981, algorithms 1 and 2: w_{t+1} = w_t - gamma g(w_{t - tau})."""
    finish = (times.matrix(WORKERS, 2 * STEPS) + 2 * times.travel).cumsum(0)
    x = [start]
    for now, version, number in arrivals(start_times(finish), finish):
        x.append(x[-1] - RATE * gradient(x[version], number))
        yield now, x[-1]


def stale_synchronous(start, gradient, times, bound=1):
    """Ho et al. 2013, section 3: a worker at clock c waits until the slowest is at clock c - s.

    jaxpar: the server makes an update where somebody reads, by the mean (not the sum) of what has arrived since.
    """
    seconds = times.matrix(WORKERS, 2 * STEPS) + 2 * times.travel
    begin, finish = np.zeros_like(seconds), seconds.copy()
    for c in range(1, len(seconds)):
        slowest = finish[c - 1 - bound].max() if c > bound else 0
        begin[c] = np.maximum(finish[c - 1], slowest)
        finish[c] = begin[c] + seconds[c]
    order = sorted(np.ndindex(*begin.shape), key=lambda place: (begin[place], place[1]))
    x, version, history = [start], {}, set()
    for place in order:
        batch = {other for other in version if finish[other] <= begin[place]} - history
        if batch:
            mean = np.mean([gradient(x[version[other]], order.index(other)) for other in batch], axis=0)
            x.append(x[-1] - RATE * mean)
            history |= batch
            yield begin[place], x[-1]
        version[place] = len(x) - 1


def backup(start, gradient, times, extra=1):
    """arXiv:1604.00981, algorithms 3 and 4: the mean of the first N gradients of N + b; the others are dropped.

    A worker reads w(t), computes, sends (G, t), and only then reads again: who is late is late for the next step too.
    """
    seconds, number, x, t = [times.stream(worker) for worker in range(WORKERS)], count(), start, 0
    free, flight = [(0.0, worker) for worker in range(WORKERS)], []
    while True:
        arrivals = []
        while len(arrivals) < WORKERS - extra:
            for now, worker in free:
                flight.append((now + next(seconds[worker]) + 2 * times.travel, worker, t, next(number)))
            now, worker, version, share = min(flight)
            flight.remove((now, worker, version, share))
            arrivals += [(worker, share)] if version == t else []
            free = [] if version == t else [(now, worker)]  # dropped: it reads the newest parameters
        x = x - RATE * np.mean([gradient(x, share) for _, share in arrivals], axis=0)
        t, free = t + 1, [(now, worker) for worker, _ in sorted(arrivals)]
        yield now, x


def two_levels(start, gradient, times, servers=2):
    """arXiv:1509.04210, section 3: below the root are servers, each with the mean of its own workers' gradients.

    jaxpar: a server waits for all its workers, where the paper's sends on what it has summed so far.
    """
    group = WORKERS // servers
    slowest = times.matrix(WORKERS, 2 * STEPS).reshape(-1, servers, group).max(-1)
    finish = (slowest + 4 * times.travel).cumsum(0)
    x = [start]
    for now, version, number in arrivals(start_times(finish), finish):
        x.append(x[-1] - RATE * np.mean([gradient(x[version], group * number + i) for i in range(group)], axis=0))
        yield now, x[-1]


DISTANCE = np.array([0.3, 0.8])  # seconds to each shard of the server, and back


def downpour(start, gradient, times):
    """Dean et al. 2012, section 4.1, with n_fetch = n_push = 1: shards of the parameters have versions of their own.

    jaxpar: plain SGD for their Adagrad. The two shards are the two matrices.
    """
    seconds, parts = times.matrix(WORKERS, 2 * STEPS), (slice(0, SPLIT), slice(SPLIT, 160))
    finish = (seconds + DISTANCE.max()).cumsum(0)
    fetch, push = start_times(finish)[..., None] + DISTANCE, finish[..., None] + DISTANCE
    order = sorted(np.ndindex(*seconds.shape), key=lambda place: (start_times(finish)[place], place[1]))
    x = [[start[part]] for part in parts]
    for t, worker, shard in sorted(np.ndindex(*push.shape), key=lambda place: push[place]):
        versions = [(push[..., s] <= fetch[t, worker, s]).sum() for s in range(2)]
        local = np.concatenate([x[s][versions[s]] for s in range(2)])
        x[shard].append(x[shard][-1] - RATE * gradient(local, order.index((t, worker)))[parts[shard]])
        yield push[t, worker, shard], np.concatenate([x[s][-1] for s in range(2)])


class ShardDelays:
    """Exponential times of gradients, and of messages those of `DISTANCE`, each way."""

    def draw(self, rng, count):
        return np.resize(DISTANCE, count) if count == 2 * len(DISTANCE) else rng.exponential(size=count)


CLOCKS = {
    "async": (Stale(), asynchronous, WorkerTimes(law=Exponential(), travel=0.1)),
    "ssp": (Stale(bound=1), stale_synchronous, WorkerTimes(law=Exponential(), travel=0.1)),
    "backup": (Backup(extra=1), backup, WorkerTimes(law=Exponential(), travel=0.1)),
    "downpour": (Downpour(shards=2), downpour, WorkerTimes(law=ShardDelays(), travel=1.0)),
    "servers": (TwoLevels(servers=2), two_levels, WorkerTimes(law=Exponential(), travel=0.1)),
}


def clock_differences(method, loop, times, monkeypatch):
    """Returns the relative difference to the paper after each update, of parameters and of its time."""
    history, apply = [], virtual_clock._Server.update

    def update(server, *args):
        apply(server, *args)
        history.append(device_copies(server.newest())[0])

    monkeypatch.setattr(virtual_clock._Server, "update", update)
    step = jp.train_step(jp.compose(lambda rngs: Net(rngs), jp.Parallel(), jax.devices()[:1]), loss, SGD)
    start = device_copies(jp.init_state(step.layout, SGD).params)[0]
    updates, batch = method.updates(WORKERS, STEPS, times), partial(make_batch, size=4)
    virtual_clock.run(step, updates, batch, lambda *_: None)
    targets = islice(loop(start, lambda x, number: closed_gradient(x, batch(number)), times), STEPS)
    triples = zip(history[:STEPS], updates[:STEPS], targets, strict=True)
    return [max(difference(x, target), abs(update.seconds / now - 1)) for x, update, (now, target) in triples]


@pytest.mark.parametrize("name", some(CLOCKS, ["backup"]))
def test_every_update_on_the_virtual_clock_is_as_its_paper_says(name, monkeypatch):
    assert max(clock_differences(*CLOCKS[name], monkeypatch)) < 1e-5


# the mean of many draws

DRAWS = 300


def width(g, levels):
    """Returns between which neighbours a code rounds an element: a level of its block's maximum. Shape as g's."""
    return np.repeat(np.abs(blocks(g)).max(-1) / levels, BLOCK, axis=-1)


def two_widths(g, levels):
    """Returns the width of what is sent by each, and of the code of their mean, whose maximum is not above theirs."""
    return [*width(g, levels) / len(g), np.repeat(np.abs(blocks(g)).max(-1).mean(0) / levels, BLOCK)]


@pytest.mark.parametrize(
    ("exchange", "widths"),
    [
        (jp.Exchange("qsgd", bits=4, **CODE_SETTINGS), lambda g: two_widths(g, 7)),  # lemma 3.1 (i)
        pytest.param(
            jp.Exchange("ternary", **CODE_SETTINGS), lambda g: two_widths(g, 1), marks=pytest.mark.slow
        ),  # section 3
        pytest.param(
            jp.Exchange("randomk", share=0.25, feedback=False, **CODE_SETTINGS),
            lambda g: [4 * np.abs(g.mean(0))],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["qsgd", "ternary", "randomk"],
)
def test_the_mean_of_what_is_drawn_is_the_gradient(exchange, widths):
    """By Hoeffding's inequality, for all 160 elements at once: a code that is right fails in one of a million tests.

    Of errors that are each between two ends a width apart, given those before, the mean of n is beyond
    sqrt(sum(width^2) / 2 log(2 / p) / n) with a probability below p.
    """
    recorder = optax.chain(optax.trace(decay=0.0), optax.scale(0.0))  # keeps a gradient, moves nothing
    layout = jp.compose(lambda rngs: Net(rngs), jp.Parallel(data=WORKERS, exchange=exchange), jax.devices()[:WORKERS])
    step, state = jp.train_step(layout, loss, recorder), jp.init_state(layout, recorder)
    problem = Problem(device_copies(state.params)[0])
    decoded = []
    for _ in range(DRAWS):
        state, _ = step(state, problem.batch(0))
        decoded.append(device_copies(state.optimizer[0].trace)[0])
    gradients = problem.gradients(problem.start, 0)
    ends = np.array(widths(gradients))
    assert (np.abs(decoded - gradients.mean(0)) <= ends.sum(0) + 1e-6).all()  # of one draw, the farthest that it may be
    bound = np.sqrt((ends**2).sum(0) / 2 * np.log(2 * 160 / 1e-6) / DRAWS)
    assert (np.abs(np.mean(decoded, axis=0) - gradients.mean(0)) <= bound).all()
    assert (decoded[0] != decoded[1]).any()
