"""Gradient release: each parameter steps as soon as its gradient is complete, and the gradient is freed at once.

The backward pass then never holds more than a layer's gradients. The weights come out bit for bit as without it. What
needs all gradients together cannot be had, and is refused or said: clipping by the global norm, accumulation over
several backward passes, replicas whose gradients are averaged after the backward pass (DDP), fp16 loss scaling.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .optim import FOAM
from .shard import replicated


class GradientRelease:
    """Attach to an optimizer's parameters; `remove()` gives them back. Use as a context manager or keep it.

        release = GradientRelease(opt)
        loss.backward()        # every weight has moved and every gradient is gone when this returns
        opt.step()             # keep calling it: schedulers and hooks run, and the next backward pass may begin
        scheduler.step()

    Args:
        opt: the optimizer; parameters added to it later are not covered.
        clip: largest norm of each parameter's own gradient (not the global norm); 0 means none.
        skip_nonfinite: leave a parameter alone where its gradient's norm is not finite, and count it in `skipped`.

    Raises:
        RuntimeError: torch.distributed runs with several ranks and the parameters are replicas; or, in the backward
            pass, a second gradient before `opt.step()` (accumulation).
    """

    def __init__(self, opt: FOAM, clip: float = 0.0, skip_nonfinite: bool = False) -> None:
        if not 0 <= clip < float("inf"):
            raise ValueError(f"clip must be finite and >= 0, got {clip}")
        if not isinstance(opt, FOAM):
            raise ValueError(f"gradient release needs a FOAM optimizer, got {type(opt).__name__}")
        if replicated(opt):
            raise RuntimeError(
                "cannot release gradients of data-parallel replicas: each would step on its own gradient before they "
                "are averaged; leave gradient release off"
            )
        self.opt, self.clip, self.skip_nonfinite = opt, clip, skip_nonfinite
        self.skipped = 0
        self._stepped: set[Tensor] = set()
        self._norms: list[Tensor] = []
        self._handles: list[RemovableHandle] = [opt.register_step_post_hook(lambda *_: self._closed())]
        number = 0
        for group in opt.param_groups:
            for i, p in enumerate(group["params"], number):
                if p.requires_grad:
                    hook = partial(self._release, group=group, number=i)
                    self._handles.append(p.register_post_accumulate_grad_hook(hook))
            number += len(group["params"])

    @torch.no_grad()
    def _release(self, p: Tensor, group: dict[str, Any], number: int) -> None:
        if p in self._stepped:
            raise RuntimeError(
                "a second backward pass before opt.step(): gradients were released, so they cannot accumulate; "
                "call opt.step() after every backward pass (also one that failed), or leave gradient release off"
            )
        if p.grad is None:
            raise RuntimeError("another GradientRelease has taken this gradient: remove() it first")
        self._stepped.add(p)
        norm = None
        if self.clip or self.skip_nonfinite:
            wide = torch.promote_types(p.grad.dtype, torch.float32)
            norm = torch.linalg.vector_norm(p.grad, dtype=wide)
            self._norms.append(norm)
        if self.skip_nonfinite and norm is not None and not norm.isfinite():
            self.skipped += 1
        else:
            if self.clip and norm is not None:
                p.grad.mul_((self.clip / (norm + 1e-6)).clamp(max=1.0))
            self.opt.step_parameter(p, group, number)
        p.grad = None

    def _closed(self) -> None:
        self._stepped.clear()
        self._norms.clear()

    def grad_norm(self) -> Tensor:
        """Norm of all gradients since the last `opt.step()`, before clipping; known only with `clip` or
        `skip_nonfinite`, otherwise 0."""
        if not self._norms:
            return torch.zeros((), device=self.opt.param_groups[0]["params"][0].device)
        return torch.nn.utils.get_total_norm(self._norms)

    def remove(self) -> None:
        """Detach: gradients accumulate and stay again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
