"""Graph networks, probabilistic programs, reinforcement learning, equivariant networks, ranking and optimal
transport."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.published.functions import BATCH, Published, classes, cross_entropy, make, normal, published, tokens

NODES, EDGES = 8, 24


def _graphs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ends = rng.integers(0, NODES, (2, BATCH, EDGES)).astype(np.int32)
    return {
        "nodes": normal(NODES, 8),
        "edges": normal(EDGES, 4, seed=3),
        "senders": ends[0],
        "receivers": ends[1],
        "label": classes(8),
    }


def _graph_task(network: Any) -> Published:
    """Graph classification; a batch of graphs by vmap."""
    import haiku as hk
    import jraph

    def one(batch: Any) -> Any:
        graph = jraph.GraphsTuple(
            nodes=batch["nodes"],
            edges=batch["edges"],
            senders=batch["senders"],
            receivers=batch["receivers"],
            globals=jnp.zeros((1, 8)),
            n_node=jnp.array([NODES]),
            n_edge=jnp.array([EDGES]),
        )
        return hk.Linear(8)(network(hk, jraph, graph).nodes.mean(0))

    net = hk.without_apply_rng(hk.transform(one))
    batch = _graphs()

    def init() -> Any:
        return net.init(jax.random.key(0), jax.tree.map(lambda x: jnp.asarray(x[0]), batch))

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(jax.vmap(net.apply, (None, 0))(params, batch), batch["label"])

    return make(loss, init, batch)


@published("jraph", "haiku")
def jraph_graph_network() -> Published:
    def network(hk: Any, jraph: Any, graph: Any) -> Any:
        def update(*parts: Any) -> Any:
            return hk.nets.MLP([32, 8])(jnp.concatenate(parts, -1))

        for _ in range(3):
            graph = jraph.GraphNetwork(
                lambda edges, sent, received, globals_: update(edges, sent, received),
                lambda nodes, sent, received, globals_: update(nodes, sent, received),
                lambda nodes, edges, globals_: update(nodes, edges, globals_),
            )(graph)
        return graph

    return _graph_task(network)


@published("jraph", "haiku")
def jraph_graph_convolution() -> Published:
    def network(hk: Any, jraph: Any, graph: Any) -> Any:
        for _ in range(3):
            graph = jraph.GraphConvolution(lambda n: jax.nn.relu(hk.Linear(32)(n)), add_self_edges=True)(graph)
        return graph

    return _graph_task(network)


@published("jraph", "haiku")
def jraph_attention() -> Published:
    def network(hk: Any, jraph: Any, graph: Any) -> Any:
        for _ in range(2):
            graph = jraph.GAT(
                lambda n: hk.Linear(16)(n),
                lambda q, k, e: jax.nn.leaky_relu(hk.Linear(1)(jnp.concatenate([q, k], -1))),
                lambda n: jax.nn.relu(n),
            )(graph)
        return graph

    return _graph_task(network)


@published("numpyro")
def numpyro_svi() -> Published:
    """Variational inference of a Bayesian neural net: the negative ELBO of a subsample."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x: Any, y: Any = None) -> None:
        w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([8, 32]).to_event(2))
        w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([32, 1]).to_event(2))
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("data", x.shape[0]), numpyro.handlers.scale(scale=256 / x.shape[0]):
            numpyro.sample("y", dist.Normal((jnp.tanh(x @ w1) @ w2)[:, 0], scale), obs=y)

    guide = AutoNormal(model)
    elbo = Trace_ELBO()
    x, y = normal(8), normal(seed=5)

    def init() -> Any:
        svi = SVI(model, guide, numpyro.optim.Adam(1e-3), elbo)
        return svi.get_params(svi.init(jax.random.PRNGKey(0), x[:2], y[:2]))

    init()  # sets up the guide

    def loss(params: Any, batch: Any, rng: Any) -> Any:
        return elbo.loss(rng, params, model, guide, batch["x"], batch["y"])

    return make(loss, init, {"x": x, "y": y}, rng=True)


@published("distrax", "haiku")
def distrax_coupling_flow() -> Published:
    import distrax
    import haiku as hk

    def log_prob(x: Any) -> Any:
        bijectors = []
        for i in range(3):
            net = hk.Sequential([hk.nets.MLP([32, 32], activate_final=True), hk.Linear(8), hk.Reshape((4, 2))])

            def bijector(parameters: Any) -> Any:
                return distrax.ScalarAffine(parameters[..., 0], log_scale=jnp.tanh(parameters[..., 1]))

            bijectors.append(distrax.MaskedCoupling(np.arange(4) % 2 == i % 2, net, bijector))
        base = distrax.MultivariateNormalDiag(jnp.zeros(4), jnp.ones(4))
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(bijectors))).log_prob(x)

    net = hk.without_apply_rng(hk.transform(log_prob))
    x = normal(4)
    return make(lambda params, batch: -net.apply(params, batch).mean(), lambda: net.init(jax.random.key(0), x[:2]), x)


@published("rlax", "haiku")
def rlax_actor_critic() -> Published:
    """V-trace returns, policy gradient, entropy and value losses of unrolled episodes."""
    import haiku as hk
    import rlax

    def policy(x: Any) -> Any:
        h = hk.nets.MLP([64, 64], activate_final=True)(x)
        return hk.Linear(6)(h), hk.Linear(1)(h)[..., 0]

    net = hk.without_apply_rng(hk.transform(policy))

    def one(params: Any, episode: Any) -> Any:
        logits, values = net.apply(params, episode["observation"])
        actions, rewards = episode["action"], episode["reward"]
        taken = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0]
        ratio = jnp.exp(jax.lax.stop_gradient(taken) - episode["log_probability"])
        discount = jnp.full(rewards.shape, 0.95)
        out = rlax.vtrace_td_error_and_advantage(values[:-1], values[1:], rewards[:-1], discount[:-1], ratio[:-1])
        weights = jnp.ones(rewards.shape[0] - 1)
        actor = rlax.policy_gradient_loss(logits[:-1], actions[:-1], out.pg_advantage, weights)
        return actor + 0.5 * (out.errors**2).mean() + 0.01 * rlax.entropy_loss(logits[:-1], weights)

    batch = {
        "observation": normal(10, 8),
        "action": tokens(10, 6),
        "reward": normal(10, seed=6),
        "log_probability": -1.5 + 0.1 * normal(10, seed=7),
    }
    return make(
        lambda params, batch: jax.vmap(one, (None, 0))(params, batch).mean(),
        lambda: net.init(jax.random.key(0), batch["observation"][0]),
        batch,
    )


@published("e3nn_jax", "flax")
def e3nn_message_passing() -> Published:
    """An equivariant layer: spherical harmonics, tensor products, scatter over edges."""
    import e3nn_jax as e3nn
    import flax.linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, positions: Any, senders: Any, receivers: Any) -> Any:
            vectors = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
            harmonics = e3nn.spherical_harmonics([0, 1, 2], vectors, True)
            features = e3nn.IrrepsArray("16x0e", jnp.ones((positions.shape[0], 16)))
            for _ in range(2):
                messages = e3nn.tensor_product(features[senders], harmonics)
                messages = e3nn.flax.Linear("16x0e + 8x1o + 4x2e")(messages)
                gathered = e3nn.scatter_sum(messages, dst=receivers, output_size=positions.shape[0])
                features = e3nn.flax.Linear("16x0e + 8x1o")(gathered)
            return nn.Dense(8)(features.filter("0e").array.mean(0))

    model, batch = Model(), {k: v for k, v in _graphs().items() if k in ("senders", "receivers", "label")}
    batch["positions"] = normal(NODES, 3)

    def init() -> Any:
        return model.init(jax.random.key(0), *(batch[k][0] for k in ("positions", "senders", "receivers")))

    def loss(params: Any, batch: Any) -> Any:
        run = jax.vmap(lambda p, s, r: model.apply(params, p, s, r))
        return cross_entropy(run(batch["positions"], batch["senders"], batch["receivers"]), batch["label"])

    return make(loss, init, batch)


@published("rax", "flax")
def rax_ranking() -> Published:
    """Lists of documents, some of them padding: listwise and pairwise losses."""
    import flax.linen as nn
    import rax

    model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(1)])
    relevance = np.random.default_rng(0).integers(0, 4, (BATCH, 12)).astype(np.float32)
    batch = {"x": normal(12, 16), "relevance": relevance, "real": np.arange(12) < classes(12)[:, None] + 1}

    def loss(params: Any, batch: Any) -> Any:
        scores = model.apply(params, batch["x"])[..., 0]
        listwise = rax.softmax_loss(scores, batch["relevance"], where=batch["real"], reduce_fn=None)
        pairwise = rax.pairwise_logistic_loss(scores, batch["relevance"], where=batch["real"], reduce_fn=None)
        return listwise.mean() + 0.1 * pairwise.sum(-1).mean()

    return make(loss, lambda: model.init(jax.random.key(0), batch["x"][:2]), batch)


@published("ott", "flax")
def ott_sinkhorn() -> Published:
    """A generator trained by optimal transport of each example's points to a cloud."""
    import flax.linen as nn
    from ott.geometry import pointcloud
    from ott.solvers import linear

    model = nn.Sequential([nn.Dense(32), nn.gelu, nn.Dense(2)])
    batch = {"noise": normal(12, 4), "target": normal(12, 2, seed=8)}

    def one(params: Any, noise: Any, target: Any) -> Any:
        geometry = pointcloud.PointCloud(model.apply(params, noise), target, epsilon=0.5)
        return linear.solve(geometry, max_iterations=20, min_iterations=20).reg_ot_cost

    def loss(params: Any, batch: Any) -> Any:
        return jax.vmap(one, (None, 0, 0))(params, batch["noise"], batch["target"]).mean()

    return make(loss, lambda: model.init(jax.random.key(0), batch["noise"][0]), batch)


@published("penzai")
def penzai_llama() -> Published:
    """Named arrays; the layers one after the other."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as llama

    config = llama.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=32,
        projection_dim=8,
        mlp_hidden_dim=64,
        num_decoder_blocks=3,
        vocab_size=64,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    model, values = pz.unbind_params(llama.build_llamalike_transformer(config, jax.random.key(0)), freeze=True)
    names = [v.label for v in values]
    axes = [tuple(v.value.named_shape) for v in values]

    def init() -> Any:
        return {str(n): v.value.unwrap(*a) for n, v, a in zip(names, values, axes, strict=True)}

    def loss(params: Any, batch: Any) -> Any:
        bound = [
            pz.ParameterValue(value=pz.nx.wrap(params[str(n)]).tag(*a), label=n)
            for n, a in zip(names, axes, strict=True)
        ]
        ids = pz.nx.wrap(batch[:, :-1]).tag("batch", "seq")
        positions = pz.nx.wrap(jnp.arange(ids.named_shape["seq"])).tag("seq")
        logits = pz.bind_variables(model, bound)(ids, token_positions=positions)
        return cross_entropy(logits.unwrap("batch", "seq", "vocabulary"), batch[:, 1:])

    return make(loss, init, tokens(16, 64))
