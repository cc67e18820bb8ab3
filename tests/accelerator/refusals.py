"""What CUDA's kernels refuse while torch.use_deterministic_algorithms(True) is set, by torch's documentation."""

from __future__ import annotations

import os
import warnings

import torch

NAMES = {
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "_adaptive_avg_pool3d_backward": "adaptive_avg_pool3d_backward_cuda",
    "adaptive_max_pool2d_backward": "adaptive_max_pool2d_backward_cuda",
    "adaptive_max_pool3d_backward": "adaptive_max_pool3d_backward_cuda",
    "avg_pool3d_backward": "avg_pool3d_backward_cuda",
    "max_pool3d_with_indices_backward": "max_pool3d_with_indices_backward_cuda",
    "fractional_max_pool2d_backward": "fractional_max_pool2d_backward_cuda",
    "fractional_max_pool3d_backward": "fractional_max_pool3d_backward_cuda",
    "max_unpool2d": "max_unpooling2d_forward_out",
    "max_unpool3d": "max_unpooling3d_forward_out",
    "upsample_linear1d_backward": "upsample_linear1d_backward_out_cuda",
    "upsample_bilinear2d_backward": "upsample_bilinear2d_backward_out_cuda",
    "_upsample_bilinear2d_aa_backward": "upsample_bilinear2d_aa_backward_out_cuda",
    "upsample_bicubic2d_backward": "upsample_bicubic2d_backward_out_cuda",
    "_upsample_bicubic2d_aa_backward": "upsample_bicubic2d_aa_backward_out_cuda",
    "upsample_trilinear3d_backward": "upsample_trilinear3d_backward_out_cuda",
    "reflection_pad1d_backward": "reflection_pad1d_backward_out_cuda",
    "reflection_pad2d_backward": "reflection_pad2d_backward_cuda",
    "reflection_pad3d_backward": "reflection_pad3d_backward_out_cuda",
    "replication_pad1d_backward": "replication_pad1d_backward_cuda",
    "replication_pad2d_backward": "replication_pad2d_backward_cuda",
    "replication_pad3d_backward": "replication_pad3d_backward_cuda",
    "grid_sampler_2d_backward": "grid_sampler_2d_backward_cuda",
    "grid_sampler_3d_backward": "grid_sampler_3d_backward_cuda",
    "nll_loss2d_forward": "nll_loss2d_forward_out_cuda_template",
    "nll_loss2d_backward": "nll_loss2d_backward_out_cuda_template",
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "histc": "_histc_cuda",
    "kthvalue": "kthvalue CUDA",
}
FLOATING_ONLY = {"cumsum": "cumsum_cuda_kernel"}
CUBLAS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"}
CUBLAS_ALERT = (
    "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
    "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses CuBLAS "
    "and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment variable "
    "before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8."
)


def check_deterministic(name: str, operands: list[torch.Tensor]) -> None:
    """Raise, or warn, where CUDA's kernel of this name does while deterministic algorithms are asked for."""
    if not torch.are_deterministic_algorithms_enabled():
        return
    base = name.removesuffix("_")
    kernel = NAMES.get(base)
    if kernel is None and base in FLOATING_ONLY and operands[0].dtype.is_floating_point:
        kernel = FLOATING_ONLY[base]
    if kernel is None and base == "bincount" and len(operands) > 1:
        kernel = "_bincount_cuda"
    if kernel is not None:
        message = (
            f"{kernel} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation, or you "
            "can use the 'warn_only=True' option, if that's acceptable for your application."
        )
    elif base in CUBLAS and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        message = CUBLAS_ALERT
    else:
        return
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)
