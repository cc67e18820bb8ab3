"""What the masked mean does to the model: the server's rules (Reddi et al., ICLR 2021; Tenison et al., TMLR 2023,
algorithm 2).

w: parameters, d: the weighted mean delta, m: the mask, all three the same elements of the slice a rank owns; the
server adds. The moments see the unmasked d and the mask scales the step that is taken, unless `mask_moments` asks for
d to be masked before (then it is not masked again). Rules are elementwise, so a rank keeps the moments of its own
slice only, and buffers of the model never come here.

Only operations that round each element by itself are used (no fused multiply-add): an element's bits must not depend
on where in a slice it lies. On different kinds of processor torch's square root may differ in its last bit.

A rule names its moments with their start values and does one step in place. To add one, write it, declare its knobs in
`knobs.py` and give it a row in `RULES`, or name it from outside as `package.module:name`: a function of `ServerKnobs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import UserError, raised, unknown
from .knobs import VARIANTS, ServerKnobs
from .plugins import find, refuse

__all__ = ["RULES", "VARIANTS", "VARIED", "Moments", "ServerKnobs", "ServerRule", "make_server"]

Moments = Mapping[str, Tensor]
Step = Callable[[Tensor, Tensor, Tensor, Moments, int], None]


@dataclass(frozen=True)
class ServerRule:
    """A step of the server: `step(w, d, m, moments, t)` moves w and the moments in place in round t = 1, 2, ...; it may
    overwrite d and m."""

    moments: Mapping[str, float]
    step: Step


VARIED = ("adam", "yogi", "adagrad")  # the rules that have variants


def sgd(knobs: ServerKnobs) -> ServerRule:
    """FedAvg: w += lr * m * d. With momentum (FedAvgM): z = momentum * z + d and w += lr * m * z."""

    def step(w: Tensor, d: Tensor, m: Tensor, moments: Moments, t: int) -> None:
        if knobs.momentum:
            d = moments["z"].mul_(knobs.momentum).add_(d).clone()
        d.mul_(m)
        lr = knobs.rate(t)
        w.add_(d.mul_(lr) if lr != 1 else d)

    return ServerRule({"z": 0.0} if knobs.momentum else {}, step)


def adaptive(
    knobs: ServerKnobs, grow: Callable[[Tensor, Tensor, float], object], first_moment: bool = True
) -> ServerRule:
    """w += lr * m * z / (sqrt(v) + eps), where `grow(v, d^2, b2)` moves v, and z is the running mean of d, or d."""
    variant = VARIANTS[knobs.variant]
    b1 = knobs.b1 if first_moment else 0.0
    b2 = variant.b2 if knobs.b2 is None else knobs.b2
    eps = variant.eps if knobs.eps is None else knobs.eps
    corrected = variant.corrected and first_moment  # Adagrad's v is a sum: there is nothing to correct

    def step(w: Tensor, d: Tensor, m: Tensor, moments: Moments, t: int) -> None:
        v = moments["v"]
        grow(v, d.square(), b2)
        root = (v / (1 - b2**t) if corrected else v).sqrt().add_(eps)
        if first_moment:
            z = moments["z"].mul_(b1).add_(d.mul_(1 - b1))
            d = z / (1 - b1**t) if corrected else z.clone()
        w.add_(d.div_(root).mul_(m).mul_(knobs.rate(t)))

    start = {"v": 0.0 if variant.corrected else eps**2}
    return ServerRule(start | ({"z": 0.0} if first_moment else {}), step)


def adam(knobs: ServerKnobs) -> ServerRule:
    """FedAdam: v = b2 v + (1 - b2) d^2."""
    return adaptive(knobs, lambda v, square, b2: v.mul_(b2).add_(square.mul_(1 - b2)))


def yogi(knobs: ServerKnobs) -> ServerRule:
    """FedYogi: v = v - (1 - b2) d^2 sign(v - d^2): v follows d^2 by steps of the size of d^2."""
    return adaptive(knobs, lambda v, square, b2: v.sub_((v - square).sign_().mul_(square).mul_(1 - b2)))


def adagrad(knobs: ServerKnobs) -> ServerRule:
    """FedAdagrad: v = v + d^2, no first moment."""
    return adaptive(knobs, lambda v, square, b2: v.add_(square), first_moment=False)


def masked_moments(rule: ServerRule) -> ServerRule:
    """Return the same rule on the masked mean: what disagreed never enters the moments."""

    def step(w: Tensor, d: Tensor, m: Tensor, moments: Moments, t: int) -> None:
        rule.step(w, d.mul_(m), torch.ones_like(m), moments, t)

    return ServerRule(rule.moments, step)


RULES: dict[str, Callable[[ServerKnobs], ServerRule]] = {"sgd": sgd, "adam": adam, "yogi": yogi, "adagrad": adagrad}


def make_server(name: str, knobs: ServerKnobs, mask_moments: bool = False) -> ServerRule:
    """Return the server rule of that name, or of that import path; it masks the moments where the knobs or the last
    argument say so."""
    if knobs.variant not in VARIANTS:
        raise unknown("server variant", knobs.variant, VARIANTS)
    rule = find("server rule", name, RULES, knobs)
    if not isinstance(rule, ServerRule):
        raise refuse("server rule", name, rule, "a ServerRule")
    if name not in RULES:
        try_out(name, rule)
    return masked_moments(rule) if mask_moments or knobs.mask_moments else rule


def try_out(name: str, rule: ServerRule) -> None:
    """Refuse a rule from outside that does not work, before a run begins: steps on six elements, on two and four."""
    d = torch.tensor([-0.5, 0.0, 0.5, 0.3, -0.2, 0.1])

    def step(part: slice) -> Tensor:
        w = torch.zeros(6)[part]
        moments = {key: torch.full_like(w, value) for key, value in rule.moments.items()}
        before = dict(moments)
        returned: object = rule.step(w, d[part].clone(), torch.ones_like(w), moments, 1)  # type: ignore[func-returns-value]
        if returned is not None or any(moments.get(key) is not moment for key, moment in before.items()):
            raise UserError(
                f"server rule '{name}': a step changes w and its moments in place (add_, copy_), returns nothing"
            )
        if not all(bool(vector.isfinite().all()) for vector in (w, *moments.values())):
            raise UserError(f"server rule '{name}' makes NaN or infinity of the delta {d.tolist()} in its first step")
        return w

    try:
        whole, parts = step(slice(0, 6)), torch.cat([step(slice(0, 2)), step(slice(2, 6))])
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"server rule '{name}' raised {raised(error)} in a step on six elements") from error
    if not torch.equal(whole, parts):
        raise UserError(f"server rule '{name}' is not elementwise: each rank has a slice of the model and no more")
