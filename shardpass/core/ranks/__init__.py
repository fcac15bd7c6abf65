"""What ties the ranks of a run together: the order of collective calls, agreement, random numbers, options.

This room knows tensors and the `Communicator` protocol. Of graphs it has only the fields in which later rooms leave
something for each other, such as `Ranks.watch`.
"""

from shardpass.core.ranks import torch_private
from shardpass.core.ranks.agree import agree, digest, diverged, fail_together
from shardpass.core.ranks.arguments import (
    require_callable,
    require_count,
    require_device,
    require_model,
    require_path,
    require_tensor,
)
from shardpass.core.ranks.autograd_order import (
    all_reduce_sum,
    begin_call,
    chained,
    drop_chain,
    end_call,
    end_chain,
    is_differentiable,
    linear_call,
    refuse_double_backward,
    refuse_inside_message,
    start_chain,
)
from shardpass.core.ranks.files import allocate, prepare_target, refuse_irregular, tells_of_full_disk
from shardpass.core.ranks.leaves import leaves_within
from shardpass.core.ranks.on_ranks import OnRanks
from shardpass.core.ranks.options import MODES, Mode, Options
from shardpass.core.ranks.ordinary import ordinary_tensors, ordinary_views
from shardpass.core.ranks.own_model import (
    FetchedUnwrapped,
    ParameterCopies,
    is_parameter,
    is_wrapped,
    refuse_shared_model,
    warn_of_unwrapped,
)
from shardpass.core.ranks.random import (
    decorrelate,
    derive_seed,
    draw_seed,
    dropout_factors,
    get_random_state,
    has_drawn,
    piece_seed,
    replayed,
    seed,
    set_random_state,
)
from shardpass.core.ranks.ranks import KeptCalls, Ranks, require_ranks, takes_followed, unfollowed
from shardpass.core.ranks.rows import (
    FollowedTensor,
    Gives,
    HoldsEdges,
    ResultWatch,
    RowSet,
    RowWatch,
    loops_first,
    plain_of,
)
from shardpass.core.ranks.schema import COUNT, mismatch
from shardpass.core.ranks.units import (
    SAFETENSORS_NAMES,
    bytes_text,
    describe,
    dtype_name,
    is_out_of_memory,
    memory_error,
    parse_bytes,
    parse_count,
)

__all__ = [
    "COUNT",
    "MODES",
    "SAFETENSORS_NAMES",
    "FetchedUnwrapped",
    "FollowedTensor",
    "Gives",
    "HoldsEdges",
    "KeptCalls",
    "Mode",
    "OnRanks",
    "Options",
    "ParameterCopies",
    "Ranks",
    "ResultWatch",
    "RowSet",
    "RowWatch",
    "agree",
    "all_reduce_sum",
    "allocate",
    "begin_call",
    "bytes_text",
    "chained",
    "decorrelate",
    "derive_seed",
    "describe",
    "digest",
    "diverged",
    "draw_seed",
    "drop_chain",
    "dropout_factors",
    "dtype_name",
    "end_call",
    "end_chain",
    "fail_together",
    "get_random_state",
    "has_drawn",
    "is_differentiable",
    "is_out_of_memory",
    "is_parameter",
    "is_wrapped",
    "leaves_within",
    "linear_call",
    "loops_first",
    "memory_error",
    "mismatch",
    "ordinary_tensors",
    "ordinary_views",
    "parse_bytes",
    "parse_count",
    "piece_seed",
    "plain_of",
    "prepare_target",
    "refuse_double_backward",
    "refuse_inside_message",
    "refuse_irregular",
    "refuse_shared_model",
    "replayed",
    "require_callable",
    "require_count",
    "require_device",
    "require_model",
    "require_path",
    "require_ranks",
    "require_tensor",
    "seed",
    "set_random_state",
    "start_chain",
    "takes_followed",
    "tells_of_full_disk",
    "torch_private",
    "unfollowed",
    "warn_of_unwrapped",
]
