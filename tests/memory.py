"""Tensors that share memory, or have none, for what refuses them."""

import torch


def at_one_address(*tensors):
    """Copies that begin at one address. The last one has its values; the others have what is left of them."""
    memory = tensors[0].new_zeros(max(t.numel() * t.itemsize for t in tensors), dtype=torch.uint8)
    return [memory[: t.numel() * t.itemsize].view(t.dtype).view(t.shape).copy_(t) for t in tensors]


class WithoutMemory(torch.Tensor):
    """As a DTensor of torch.distributed is, and a tensor of FakeTensorMode: all but its values is there, and its address reads as 0."""

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")
