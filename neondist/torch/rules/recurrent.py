"""Recurrent layers: ranks share the sequences of a batch, and each computes whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ir.graph import Value
from ..ir.layout import Atom, axes_of
from ..ir.registry import rule
from ..lowering.lowering import Lowering
from .random import apply_dropout, draw_uniform


@rule("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input", applies_if_replicated=True)
def recurrent(
    lowering: Lowering,
    x: Value,
    hx: Value | Sequence[Value],
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Value, ...]:
    """Gather each sequence, and partition the batch instead; key dropout between layers by the global index."""
    has_dropout = train and dropout > 0 and num_layers > 1
    op, fake_outs, initial_states = lowering.target, lowering.fake_out, [hx] if isinstance(hx, Value) else hx
    (x,), final_layout = lowering.co_align([x], [1 if batch_first else 0, 2])
    batch_dim = x.layout[0 if batch_first else 1]
    layouts = [(*x.layout[:2], (Atom(fake_outs[0].shape[2]),))]
    layouts += [((Atom(y.shape[0]),), batch_dim, (Atom(y.shape[2]),)) for y in fake_outs[1:]]
    states = [lowering.partition_as(state, layout) for state, layout in zip(initial_states, layouts[1:], strict=True)]
    params = [lowering.sum_gradient(lowering.gather(param), axes_of(x.layout)) for param in params]
    draws = [draw_uniform(lowering, layouts[0]) for _ in range(num_layers - 1)] if has_dropout else []
    num_calls = len(draws) + 1
    options = has_biases, num_layers // num_calls, 0.0, train, bidirectional, batch_first

    def run(x: torch.Tensor, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        chunks_by_state = [state.chunk(num_calls) for state in tensors[: len(states)]]
        weights, weights_per_call = tensors[len(states) : len(states) + len(params)], len(params) // num_calls
        draws = tensors[len(states) + len(params) :]
        final_states = []
        for call in range(num_calls):
            if call:
                x = apply_dropout(dropout, x, draws[call - 1])
            start = [chunks[call] for chunks in chunks_by_state]
            call_weights = weights[call * weights_per_call : (call + 1) * weights_per_call]
            x, *ends = op(x, start if len(start) > 1 else start[0], call_weights, *options)
            final_states.append(ends)
        return x, *map(torch.cat, zip(*final_states, strict=True))

    run_eagerly = torch._disable_dynamo(run)  # Inductor would unroll the sequence, and compile for minutes
    y, *final_states = lowering.local_results(run_eagerly, [x, *states, *params, *draws], fake_outs, layouts)
    return lowering.partition_as(y, (*final_layout[:2], *y.layout[2:])), *final_states
