"""What the stand-ins for ``edge_index`` and ``batch`` answer as any tensor does: questions about shape and dtype."""

from __future__ import annotations

from typing import Any

_DESCRIBES = frozenset(
    "size dim numel nelement stride __len__ is_floating_point is_complex is_signed ndimension element_size get_device "
    "is_contiguous data_ptr __hash__ storage_offset is_inference new_ones new_zeros new_full new_empty ones_like "
    "zeros_like full_like empty_like rand_like requires_grad_ is_same_size".split()
)
_PROPERTIES = frozenset(
    "shape dtype device layout is_cuda is_cpu is_sparse is_sparse_csr is_quantized is_meta is_mps is_nested is_mkldnn "
    "is_xpu is_vulkan is_ipu ndim requires_grad is_leaf grad_fn grad itemsize nbytes names output_nr _version".split()
)
PRINTS = frozenset(["__repr__", "__str__", "__format__"])


def describes(func: Any) -> bool:
    """Whether a torch function only describes a tensor, and its result does not depend on the numbers in it."""
    name = getattr(func, "__name__", "")
    return name in _DESCRIBES or (
        name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in _PROPERTIES
    )
