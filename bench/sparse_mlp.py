"""SparseMlp: the experts of `ftw.bench.decoder`, fit for CUDA graphs.

N   tokens     K  experts of one token     E  experts
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

_FEW_TOKENS = 64  # up to which every expert may get all of them: a step never waits for counts
_WITH_GROUPED_PRODUCTS = ((9, 0), (10, 0))  # Hopper and Blackwell; elsewhere torch lets the host wait for counts


class Experts(nn.Module):
    """The weights of all experts: `gate_up_proj` [E, 2 * intermediate, hidden], `down_proj` the other way round."""

    def __init__(self, hidden: int, intermediate: int, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))


class SparseMlp(nn.Module):
    """Experts of which each token takes the likeliest; no sum depends on the order in which threads come.

    With `is_grouped` each expert multiplies the tokens that chose it, by one grouped product for all, which neither
    pads nor waits. Without it every expert has room for as many tokens as the one chosen most, which has to be counted
    for a prompt; for a step of up to 64 tokens the room is all of them, or the experts of a few tokens are gathered.
    """

    def __init__(
        self, hidden: int, intermediate: int, experts: int, experts_per_token: int, *, is_grouped: bool
    ) -> None:
        super().__init__()
        self.is_grouped = is_grouped
        self.experts_per_token = experts_per_token
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(hidden, intermediate, experts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[B, S, hidden]`."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        shares, chosen = self.gate(flat).float().softmax(dim=-1).topk(self.experts_per_token)
        shares = (shares / shares.sum(dim=-1, keepdim=True)).to(hidden.dtype)
        found = self._choose(chosen.numel())(flat, chosen).view(*chosen.shape, -1)
        mixed: torch.Tensor = (found * shares[..., None]).sum(dim=1)
        return mixed.view(hidden.shape)

    def _choose(self, num_choices: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        if self.is_grouped:
            return self._grouped
        return self._gathered if 2 * num_choices <= self.gate.out_features else self._padded

    def _gathered(self, flat: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return what the experts chosen `[N, K]` make of their tokens, `[N * K, hidden]`: their weights are copied."""
        numbers = chosen.reshape(-1)
        tokens = flat.repeat_interleave(chosen.shape[1], dim=0)[:, None]
        inner = swiglu(*(tokens @ self.experts.gate_up_proj[numbers].mT).chunk(2, dim=-1))
        return (inner @ self.experts.down_proj[numbers].mT)[:, 0]

    def _padded(self, flat: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Do the same with room for the same number of tokens at each expert."""
        expert, order = chosen.reshape(-1).sort(stable=True)
        numbers = torch.arange(self.gate.out_features, device=flat.device)
        place = torch.arange(expert.numel(), device=flat.device) - torch.searchsorted(expert, numbers)[expert]
        room = flat.shape[0] if flat.shape[0] <= _FEW_TOKENS else int(place.max()) + 1
        tokens = flat.new_zeros(numbers.numel(), room, flat.shape[1])
        tokens[expert, place] = flat[order // chosen.shape[1]]
        inner = swiglu(*(tokens @ self.experts.gate_up_proj.mT).chunk(2, dim=-1))
        outer = inner @ self.experts.down_proj.mT
        found = flat.new_empty(expert.numel(), flat.shape[1])
        found[order] = outer[expert, place]
        return found

    def _grouped(self, flat: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Do the same by grouped products."""
        expert, order = chosen.reshape(-1).sort(stable=True)
        numbers = torch.arange(self.gate.out_features, device=flat.device)
        ends = torch.searchsorted(expert, numbers, right=True).int()
        tokens = flat[order // chosen.shape[1]]
        inner = swiglu(*torch._grouped_mm(tokens, self.experts.gate_up_proj.mT, offs=ends).chunk(2, dim=-1))
        outer = torch._grouped_mm(inner, self.experts.down_proj.mT, offs=ends)
        found = torch.empty_like(outer)
        found[order] = outer
        return found


def has_grouped_products(device: torch.device) -> bool:
    """Tell whether grouped products run on the device without the host waiting for counts."""
    if device.type != "cuda" or not hasattr(torch, "_grouped_mm") or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) in _WITH_GROUPED_PRODUCTS


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, in shape of both."""
    return F.silu(gate) * up
