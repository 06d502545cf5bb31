"""Train the tiny model on the standard library's own functions; needs two CPU cores, one hour.

    python examples/train_tiny_model.py --out tiny_model.safetensors

The defaults are the settings that made the weights beside this file, with 1.77 bits per byte on
the held-out modules of Python 3.11. Another Python version has another standard library, and
another machine another order of additions, so either gives other bits. The loss is in bits per
token, and a token is a byte but for the two that open and close a document.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import prompts
from memories import NoCache
from tiny_model import WEIGHTS, Config, TinyModel, load, save


def batches(documents: list[np.ndarray], rows: int, width: int, seed: int) -> Iterator[np.ndarray]:
    """Endless batches i32[rows, width + 1], epoch after epoch of shuffled documents end to end."""
    rng = np.random.default_rng(seed)
    while True:
        stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
        stream = stream[rng.integers(width) :]
        count = (len(stream) - 1) // width
        starts = rng.permutation(count)[: count - count % rows].reshape(-1, rows) * width
        for first in starts:
            yield stream[first[:, None] + np.arange(width + 1)]


def mean_loss(model: TinyModel, tokens: jax.Array) -> jax.Array:
    """Mean cross entropy f32[] in nats of predicting tokens[:, 1:] of i32[rows, width + 1]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    memory = NoCache(model.config, *inputs.shape, parallel=True)
    logits = model.logits(model(inputs, memory))
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def optimizer(steps: int, rate: float) -> optax.GradientTransformation:
    """AdamW behind a clipped gradient, warmed up and then led to zero along a cosine."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, min(200, steps // 10), steps)
    decayed = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)  # noqa: E731
    adam = optax.adamw(schedule, b1=0.9, b2=0.98, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def train_step(graph: nnx.GraphDef, update: optax.GradientTransformation):
    """The jitted step (params, optimizer state, tokens) -> (params, optimizer state, loss)."""

    def step(params, state, tokens):
        loss_of = lambda params: mean_loss(nnx.merge(graph, params), tokens)  # noqa: E731
        loss, gradients = jax.value_and_grad(loss_of)(params)
        changes, state = update.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def held_out_bits(model: TinyModel, width: int) -> float:
    """Bits per token over the held-out modules' functions."""
    documents = prompts.documents(prompts.held_out_files())
    stream = np.concatenate(documents)
    starts = np.arange(0, len(stream) - width - 1, width)
    loss = nnx.jit(mean_loss)
    rows = 16
    groups = starts[: len(starts) - len(starts) % rows].reshape(-1, rows)
    losses = [loss(model, stream[g[:, None] + np.arange(width + 1)]) for g in groups]
    return float(np.mean(losses)) / math.log(2)


def main() -> None:
    """Train, save, load what was saved, and report its held-out loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a batch")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--save-every", type=int, default=500, help="steps between saves")
    args = parser.parse_args()

    config = Config()
    graph, params = nnx.split(TinyModel(config, nnx.Rngs(args.seed)))
    update = optimizer(args.steps, args.rate)
    state, step_once = update.init(params), train_step(graph, update)
    documents = prompts.documents(prompts.training_files())
    data = batches(documents, args.rows, config.context, args.seed)
    recent = []
    with tqdm(range(1, args.steps + 1), desc="training", unit="step", mininterval=1) as bar:
        for step in bar:
            params, state, loss = step_once(params, state, jnp.asarray(next(data)))
            recent.append(float(loss))
            if step % 20 == 0:
                bits = float(np.mean(recent)) / math.log(2)
                bar.set_postfix_str(f"{bits:.3f} bits per byte")
                recent = []
            if step % args.save_every == 0:
                save(nnx.merge(graph, params), args.out)
    save(nnx.merge(graph, params), args.out)
    bits = held_out_bits(load(args.out), config.context)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes; held out: {bits:.3f} bits per byte")


if __name__ == "__main__":
    main()
