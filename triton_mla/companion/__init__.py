"""What a model needs beside attention, with bits of each row's own: products, operations along rows, rotary embedding, routing to experts,
and sums over the ranks of tensor parallelism.

Every operation adds in one order, which its docstring says and docs/numerics.md lists. Forward only: a tensor that requires grad is a ValueError
while gradients are recorded. Operators, which torch.compile sees, are refused by autograd when the gradient is asked for.
"""

from .collectives import ordered_all_reduce
from .products import bmm, grouped_linear, linear, matmul, moe_experts
from .rotary import rotary_embedding
from .routing import route_tokens
from .rows import log_softmax, mean, rms_norm, silu_and_mul, softmax

__all__ = [
    "bmm", "grouped_linear", "linear", "log_softmax", "matmul", "mean", "moe_experts", "ordered_all_reduce", "rms_norm", "rotary_embedding",
    "route_tokens", "silu_and_mul", "softmax",
]
