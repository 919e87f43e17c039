"""Routes tokens to experts by megatron's top-k router, with losses that count every token of a micro-batch once.

Dimensions: `T` tokens of a micro-batch on all ranks that share it (tensor parallel x context parallel). `N` of them are
no padding. `E` experts. `p` are router probabilities (a softmax over all experts), and `n_e` tokens go to expert `e`:

    load balancing   coefficient * E / (topk * N^2) * sum_e n_e * sum_t p_te    (Fedus et al., arXiv 2101.03961, eq. 4)
    z-loss           coefficient / N * sum_t (log sum_e exp(logit_te))^2        (Zoph et al., arXiv 2202.08906, eq. 5)

Each rank attaches the part of its own tokens; gradients of the router's weight add up over the ranks. Two things differ
from megatron's own:

    padding only    a micro-batch of padding alone keeps a rank in step with the others; its losses are 0 and not 0 / 0
    z-loss          it divides by N. megatron averages each rank's mean, so its loss depends on where the padding lies

Nothing is written to megatron's process-wide table of router losses.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    router_gating_linear,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mrl import patches
from mrl.mcore_models import lora

patches.check(__name__)


class Router(TopKRouter):
    def gating(self, input: Tensor) -> Tensor:
        """Returns logits [..., E] in fp32, with those of the router's adapter if it has one.

        If transformer-engine is installed, megatron multiplies by it, under the local spec too
        (`RouterGatingLinearFunction`, moe_utils.py). It rounds fp32 factors to TF32, and this chose other experts
        (docs/evidence/h100.md). So torch multiplies if weights are fp32. Weights of 16 bits keep their factors whole,
        and their gradients do not show TF32's rounding. Only gpt-oss came out wrong with them. Its router alone has a
        bias, so transformer-engine is suspected, and the bias is added afterwards.
        """
        if self.weight.dtype == torch.float32:
            logits = F.linear(input, self.weight)
        else:
            logits = router_gating_linear(input, self.weight, None, torch.float32)
        if self.bias is not None:
            logits = logits + self.bias.float()
        added = lora.adapter_output(self, input)
        return logits + added if isinstance(added, Tensor) else logits

    def _sum_over_shards(self, count: Tensor) -> Tensor:
        """Returns `count`, summed over all ranks that hold a part of the micro-batch."""
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(count, group=self.tp_cp_group)
        return count

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Does nothing. megatron counts tokens here, to move the experts' bias after a step; ours stays as the
        model's."""

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Returns probs with the load-balancing loss attached; scores and routing_map are zero in padding."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        tokens_per_expert = self._sum_over_shards(routing_map.sum(dim=0))
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=tokens_per_expert,
            total_num_tokens=(tokens_per_expert.sum() // self.topk).clamp(min=1),
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
            fused=self.config.moe_router_fusion,
        )
        return MoEAuxLossAutoScaler.apply(probs, loss)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Returns logits [T / ranks, E] with the z-loss attached. padding_mask: True where no token is."""
        if self.config.moe_z_loss_coeff is None or not self.training or not torch.is_grad_enabled():
            return logits
        real = torch.ones_like(logits[:, 0], dtype=torch.bool) if padding_mask is None else ~padding_mask
        total = self._sum_over_shards(real.sum()).clamp(min=1)
        loss = (torch.logsumexp(logits, dim=-1).square() * real).sum() * self.config.moe_z_loss_coeff / total
        return MoEAuxLossAutoScaler.apply(logits, loss)
