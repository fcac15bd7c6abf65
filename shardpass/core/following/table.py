"""What a primitive operation makes of rows, known by what it is: a rule for each kind.

An operation that is pointwise by torch's own tag, or of a kind in `_KINDS`, is judged by its arguments: which dimension
of an operand holds rows, and along which dimensions the operation works. No value and no number of rows is looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardpass.core.following import kinds, places
from shardpass.core.following.call import Call, Found, Made, Rule, aligned

_KINDS: dict[Rule, str] = {
    kinds.reduction: (
        "sum nansum count_nonzero mean amax amin any all prod var std var_mean std_mean norm "
        "linalg_vector_norm logsumexp argmax argmin max min median nanmedian mode kthvalue aminmax "
        "nanmean"
    ),
    kinds.along: (
        "_softmax _log_softmax softmax log_softmax cumsum cumsum_ cumprod cumprod_ sort topk cummax "
        "cummin logcumsumexp flip roll _fft_r2c _fft_c2c _fft_c2r _sample_dirichlet "
        "linalg_cross glu"
    ),
    kinds.matrices: (
        "tril triu tril_ triu_ cholesky cholesky_solve cholesky_inverse linalg_pinv _linalg_check_errors "
        "_linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet "
        "_linalg_solve_ex _linalg_svd linalg_cholesky_ex linalg_eig linalg_eigvals linalg_householder_product "
        "linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor_ex linalg_lu_solve "
        "linalg_matrix_exp linalg_qr linalg_solve_triangular"
    ),
    kinds.renorm: "renorm renorm_",
    kinds.product: "mm addmm _addmm_activation bmm baddbmm mv addmv dot vdot outer ger addr addr_",
    kinds.convolution: (
        "convolution _convolution convolution_overrideable mkldnn_convolution cudnn_convolution thnn_conv2d"
    ),
    kinds.patches: "im2col col2im",
    kinds.three_factors: "_trilinear",
    kinds.distances: "_cdist_forward _euclidean_dist",
    kinds.layer_norm: "native_layer_norm _fused_rms_norm",
    kinds.group_norm: "native_group_norm",
    kinds.batch_norm: (
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm "
        "_native_batch_norm_legit_functional _batch_norm_with_update _batch_norm_with_update_functional "
        "_batch_norm_no_update"
    ),
    places.look_up: "embedding",
    places.select_entries: "index_select",
    places.at_own_places: (
        "gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ take_along_dim"
    ),
    places.filled: "index_fill index_fill_",
    places.added_along: "index_add index_add_ index_copy index_copy_ index_reduce index_reduce_",
    places.indexed: "index _unsafe_index",
    places.put: "index_put index_put_ _unsafe_index_put _index_put_impl_",
    places.joined: "cat",
    places.stacked: "stack",
    places.repeated: "repeat",
    places.padded: "constant_pad_nd",
    kinds.together: (
        "_pdist_forward segment_reduce unique_dim _unique2 _unique unique_consecutive histc bincount "
        "trace take put put_ pdist linalg_lstsq cov corrcoef"
    ),
    places.is_in: "isin",
    places.searched: "searchsorted bucketize",
    kinds.drawn: "multinomial",
    kinds.nll_loss: "nll_loss_forward nll_loss2d_forward",
    kinds.attention: (
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_attention_math _fused_sdp_choice"
    ),
    kinds.recurrent: "mkldnn_rnn_layer",
    places.seen: (
        "permute transpose t unsqueeze squeeze expand alias detach view_as_real view_as_complex diagonal unfold"
    ),
    kinds.spatial: (
        "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool2d avg_pool3d "
        "max_pool2d_with_indices max_pool3d_with_indices reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d "
        "upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d"
    ),
    kinds.of_each: "affine_grid_generator grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback",
    kinds.by_channel: "fake_quantize_per_channel_affine_cachemask _fake_quantize_learnable_per_channel_affine",
    kinds.shuffled: "pixel_shuffle pixel_unshuffle",
    places.viewed: "view _unsafe_view reshape _reshape_alias",
    places.part: (
        "select slice narrow split split_with_sizes unbind chunk unsafe_split unsafe_split_with_sizes unsafe_chunk"
    ),
}
RULES: dict[str, Rule] = {name: rule for rule, names in _KINDS.items() for name in names.split()}
"""By the name of an operation without its overload."""

_POINTWISE = frozenset(
    "_to_copy copy_ copy clone alias detach lift_fresh_copy bernoulli bernoulli_ rand_like randn_like randint_like "
    "empty_like zeros_like ones_like full_like uniform_ normal_ random_ exponential_ cauchy_ log_normal_ geometric_ "
    "native_dropout _fused_dropout poisson _standard_gamma binomial zero_ fill_ rrelu_with_noise "
    "rrelu_with_noise_ _thnn_fused_lstm_cell where masked_fill masked_fill_ lerp lerp_ normal addcmul addcdiv clamp "
    "contiguous fill real imag conj _conj resolve_conj resolve_neg view_as_complex_copy isclose complex polar "
    "_prelu_kernel prelu nan_to_num polygamma fake_quantize_per_tensor_affine_cachemask".split()
)
"""Operations that are pointwise without torch's tag saying so in every version, or with random numbers of their own."""

_LOSSES = frozenset(
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss "
    "l1_loss kl_div".split()
)

_ADDITIVE = frozenset("add add_ sub sub_ subtract cat stack rsub".split())
_HOMOGENEOUS = frozenset(
    "mul mul_ div div_ true_divide neg neg_ mm bmm dot mv vdot sum mean nansum clone _to_copy alias detach view "
    "_unsafe_view reshape permute transpose t unsqueeze squeeze select slice expand index index_select gather "
    "flip roll split split_with_sizes unbind unfold diagonal cumsum repeat _reshape_alias positive real imag "
    "squeeze_ unsqueeze_ t_ transpose_ lift_fresh_copy view_as_real view_as_complex as_strided tril triu".split()
)


def is_pointwise(func: Any) -> bool:
    """Whether each entry of a result comes from the entries at its place, by torch's own tag or by what it is."""
    return torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in _POINTWISE


def rule_of(func: Any) -> Rule | None:
    """The rule for an operation, as a dispatch mode sees it; `None` if there is none."""
    name = func.overloadpacket.__name__
    if name in _LOSSES:
        return kinds.loss
    return _pointwise if is_pointwise(func) else RULES.get(name.removesuffix("_"), RULES.get(name))


def judged(call: Call) -> list[Found] | None:
    """What holds for each result of `call`; `None` if there is no rule for its operation."""
    rule = rule_of(call.func)
    if rule is None:
        return None
    if not call.rows():
        return [_of_sums(call)] * len(call.outs)
    if any(isinstance(call.of(one), Made) for one in call.tensors):
        return [Made.MIXED] * len(call.outs)  # what was made of several rows meets single ones
    found = rule(call)
    return found if isinstance(found, list) else [found] * len(call.outs)


def _of_sums(call: Call) -> Found:
    """What is made of operands without rows of which some were made of several: sums, if the operation is linear."""
    marks = [call.of(one) for one in call.tensors]
    if not any(isinstance(mark, Made) for mark in marks):
        return None
    if Made.MIXED in marks or not call.outs or (call.name == "_to_copy" and not call.outs[0].is_floating_point()):
        return Made.MIXED
    if call.name in _ADDITIVE and all(mark is Made.SUM for mark in marks):
        numbers = [call.given.get("other")] if not isinstance(call.given.get("other"), Tensor) else []
        return Made.MIXED if call.name not in ("cat", "stack") and numbers else Made.SUM
    if call.name not in _HOMOGENEOUS or marks.count(Made.SUM) != 1 or call.given.get("rounding_mode"):
        return Made.MIXED
    if call.name in ("div", "div_", "true_divide", "index", "index_select", "gather") and marks[0] is not Made.SUM:
        return Made.MIXED
    return Made.SUM


def _pointwise(call: Call) -> Any:
    return [aligned(call, out) for out in call.outs]
