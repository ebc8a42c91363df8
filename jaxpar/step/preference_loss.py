"""The loss of direct preference optimization (DPO): a model learns to prefer one answer of a pair to the other.

    chosen_inputs   [pairs, seq] ─┐
                                  ├─► rows [2 pairs, seq] ─► policy    ─► log-probabilities of the answers ─┐
    rejected_inputs [pairs, seq] ─┘                      └─► reference ─► the same, without a gradient ─────┴─► loss

A pair's two rows become neighbours, so that each device keeps its own pairs and no token moves.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.models.auxiliary import collect_sums
from jaxpar.models.output_dtype import keep_output_dtype
from jaxpar.models.settings.computing import LARGEST, add_logits
from jaxpar.models.settings.fine_tuning import DPO
from jaxpar.step.head.chunks import Chunks, token_losses
from jaxpar.step.head.head_protocol import has_head, read_head, vocab_size
from jaxpar.step.head.token_sharding import token_sharding
from jaxpar.step.losses import Sums, cross_entropy

SIDES = ("chosen", "rejected")
ARRAYS = ("inputs", "targets", "mask")


def dpo_loss(
    model: Any,
    batch: Mapping[str, jax.Array],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    largest: int = LARGEST,
) -> Sums:
    """The DPO loss of pairs of answers, and their implicit rewards.

    With h the difference of the log-ratios (policy to reference) of the chosen and the rejected answer, a pair's loss
    is -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), where e is the label smoothing. An answer's reward is beta
    times its log-ratio. A pair counts if at least one of its tokens does.

    Args:
      model: The policy and its frozen reference, of `jp.add_reference`; both map tokens [batch, seq] to logits [batch,
        seq, vocab], and no token may depend on later ones, which may be padding.
      batch: `chosen_inputs`, `chosen_targets`, `chosen_mask` and the same of `rejected` [pairs, seq], int32; a mask is
        1 where the target is a token of the answer.
      beta: Strength of the pull towards the reference.
      label_smoothing: Probability that a label is wrong, below 0.5.
      largest: Maximum bytes of float32 logits per device that are computed without chunks, as in `next_token_loss`.

    Returns:
      Sums and counts over pairs: `loss`, `reward_chosen`, `reward_rejected`, `reward_margin` and `reward_accuracy`
      (whether the chosen answer has the higher reward). Losses that the policy adds, such as the balance of experts,
      are part of `loss`; `preference_loss` is then the loss without them.

    Raises:
      JaxparError: If the model has no reference, or arrays are missing or have other shapes.

    Source: Rafailov et al. (2023), arXiv:2305.18290, equation 7; the smoothing is that of Mitchell (2023), "A note on
    DPO with noisy preferences", as in TRL's `DPOTrainer`.
    """
    DPO(beta=beta, label_smoothing=label_smoothing)
    if not hasattr(model, "policy") or not hasattr(model, "reference"):
        raise refuse(
            f"jp.dpo_loss with {type(model).__name__}, which has no reference",
            rule="DPO compares a model with its frozen reference",
            fix="jp.compose(jp.add_reference(model), ...), and jp.freeze(optimizer, ['reference'])",
        )
    inputs, targets, mask = (_pair_rows(batch, name) for name in ARRAYS)
    with collect_sums() as sums:
        policy = answer_log_probs(model.policy, inputs, targets, mask, largest=largest)
    with collect_sums():  # the losses that the reference would add are dropped
        reference = answer_log_probs(model.reference, inputs, targets, mask, largest=largest)
    rewards = beta * (policy - jax.lax.stop_gradient(reference)).reshape(-1, 2)
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    margin = chosen - rejected
    losses = -(1 - label_smoothing) * jax.nn.log_sigmoid(margin) - label_smoothing * jax.nn.log_sigmoid(-margin)
    counted = jnp.any(mask.reshape(margin.shape[0], -1) != 0, axis=-1).astype(jnp.float32)
    pairs = jnp.sum(counted)
    values = {
        "loss": losses,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": margin,
        "reward_accuracy": (margin > 0).astype(jnp.float32),
    }
    result = {name: (jnp.sum(value * counted), pairs) for name, value in values.items()}
    if not sums.loss:
        return {**result, **sums.measures}
    added = jnp.sum(jnp.stack(sums.loss).sum(axis=0).reshape(-1, 2).mean(axis=-1) * counted)
    total = result["loss"][0] + added
    return {**result, "loss": (total, pairs), "preference_loss": result["loss"], **sums.measures}


def answer_log_probs(
    model: Any, inputs: jax.Array, targets: jax.Array, mask: jax.Array, *, largest: int = LARGEST
) -> jax.Array:
    """Returns the log-probability of each row's answer: the sum over its tokens, in nats. Shape [rows], float32.

    Args:
      model: Maps tokens [rows, seq] to logits [rows, seq, vocab].
      inputs: Tokens. Shape [rows, seq].
      targets: The next tokens. Shape [rows, seq].
      mask: 1 where the target belongs to the answer. Shape [rows, seq].
      largest: Maximum bytes of float32 logits per device that are computed without chunks.
    """
    weights, labels = mask.astype(jnp.float32), jnp.where(mask == 0, 0, targets).astype(jnp.int32)
    sharding = token_sharding(*inputs.shape)
    if has_head(model) and sharding is not None:
        logits = sharding.logits(inputs.size, vocab_size(model), largest=largest)
        add_logits(logits)
        if logits.is_chunked:
            head = read_head(model, inputs)
            how = Chunks(sharding, logits.chunks, head.table, head.vocab)
            losses: Any = token_losses(how, head.hidden, head.weight, labels)
            return -jnp.sum(losses * weights, axis=-1)
    with keep_output_dtype():  # cross entropy casts to float32 where it sums
        logits = model(inputs)
    return -jnp.sum(cross_entropy(logits, labels) * weights, axis=-1)


def trace_answers(model: object, batch: Mapping[str, jax.Array]) -> Sums:
    """Calls a model without a reference on both answers of a batch, to trace the use of its parameters."""
    total = jnp.sum(answer_log_probs(model, *(_pair_rows(batch, name) for name in ARRAYS)))
    return {"loss": (-total, jnp.float32(1.0))}


def _pair_rows(batch: Mapping[str, jax.Array], name: str) -> jax.Array:
    """Returns the rows of both answers, a pair's next to each other. Shape [2 pairs, seq]."""
    keys = [f"{side}_{name}" for side in SIDES]
    missing = [key for key in keys if key not in batch]
    shapes = {key: list(batch[key].shape) for key in keys if key in batch}
    expected = list(batch["chosen_inputs"].shape) if "chosen_inputs" in batch else []
    if missing or len(expected) != 2 or any(shape != expected for shape in shapes.values()):
        got = (
            f"a batch without {missing[0]}" if missing else f"{keys[0]} {shapes[keys[0]]}, {keys[1]} {shapes[keys[1]]}"
        )
        raise refuse(
            got,
            rule="pairs are chosen_inputs, chosen_targets and chosen_mask, and the same of rejected, all [pairs, seq]",
            fix="data.preferences = true, whose rows have a prompt, a chosen and a rejected answer",
        )
    chosen, rejected = (batch[key] for key in keys)
    return jnp.stack([chosen, rejected], axis=1).reshape(2 * chosen.shape[0], chosen.shape[1])
