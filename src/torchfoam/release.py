"""Gradient release: each parameter steps as soon as its gradient is complete, and the gradient is freed at once.

The backward pass then never holds more than a layer's gradients. The weights come out bit for bit as without it. What
needs all gradients together is incompatible, and is refused or said: clipping by the global norm, accumulation over
several backward passes, replicas whose gradients are averaged after the backward pass (DDP; FSDP2's are complete), loss
scaling, reentrant checkpointing (a layer used twice would step on half of its gradient). What can be known is refused
before the first weight moves.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .optim import FOAM
from .shard import local, replicated, whole_tensor

# optimizers whose gradients are released now
_releasing: WeakSet[FOAM] = WeakSet()


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
        RuntimeError: the optimizer's gradients are released already, or torch.distributed runs with several ranks,
            whose parameters are replicas; at the first gradient, a loss scaled by a GradScaler or reentrant
            checkpointing; later, a second gradient before `opt.step()` (accumulation).
    """

    def __init__(self, opt: FOAM, clip: float = 0.0, skip_nonfinite: bool = False) -> None:
        if not 0 <= clip < float("inf"):
            raise ValueError(f"clip must be finite and >= 0, got {clip}")
        if not isinstance(opt, FOAM):
            raise ValueError(f"gradient release needs a FOAM optimizer, got {type(opt).__name__}")
        if opt in _releasing:
            raise RuntimeError("the gradients of this optimizer are released already: remove() the other one first")
        _check_replicas(opt)
        _releasing.add(opt)
        self.opt, self.clip, self.skip_nonfinite = opt, clip, skip_nonfinite
        self.skipped = 0
        self._first = True
        self._before: WeakSet[Any] = WeakSet(_suspects())
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
            raise RuntimeError("another hook has taken this gradient: it cannot be released twice")
        if self._first:
            _check_replicas(self.opt)
            _check_backward(self._before)
            self._first = False
        if not self._stepped:
            self.opt.check_ready()
        self._stepped.add(p)
        norm = None
        if self.clip or self.skip_nonfinite:
            wide = torch.promote_types(p.grad.dtype, torch.float32)
            norm = whole_tensor(torch.linalg.vector_norm(p.grad, dtype=wide))
            self._norms.append(norm)
        if self.skip_nonfinite and norm is not None and not norm.isfinite():
            self.skipped += 1
        else:
            if self.clip and norm is not None:
                local(p.grad).mul_((self.clip / (norm + 1e-6)).clamp(max=1.0))
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
        _releasing.discard(self.opt)

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _check_replicas(opt: FOAM) -> None:
    if replicated(opt):
        raise RuntimeError(
            "cannot release gradients of data-parallel replicas: each would step on its own gradient before they "
            "are averaged; leave gradient release off"
        )


def _check_backward(before: WeakSet[Any]) -> None:
    """Raise RuntimeError if the backward pass that begins now gives gradients that are scaled, or in parts; what was
    there `before` the release does not count."""
    for x in _suspects():
        if x in before:
            continue
        if isinstance(x, torch.amp.GradScaler):
            raise RuntimeError(
                "cannot release gradients of a loss that a GradScaler has scaled: they would be stepped on before they "
                "are unscaled; train in bfloat16 without one, or leave gradient release off (nothing was stepped)"
            )
        raise RuntimeError(
            "cannot release gradients under reentrant checkpointing: a layer used twice would step on half of its "
            "gradient; checkpoint with use_reentrant=False, or leave gradient release off (nothing was stepped)"
        )


def _suspects() -> Iterator[Any]:
    """Parts of graphs made by reentrant checkpointing, and scalers that have scaled a loss and not yet a gradient back.

    Nothing tells a hook where its gradient comes from. But a graph and a scaler are alive in their backward pass, so
    the objects of this process are looked through, when a release is made and at its first gradient (some 30 ms each,
    0.1 s a million objects).
    """
    checkpoints = [x for x in torch.autograd.Function.__subclasses__() if x.__name__ == "CheckpointFunction"]
    scalers = tuple(_family(torch.amp.GradScaler))
    for x in gc.get_referrers(*(c._backward_cls for c in checkpoints), *scalers):
        if type(x).__name__ == "CheckpointFunctionBackward":
            yield x
        # one that has unscaled a gradient serves another optimizer
        elif issubclass(type(x), scalers) and getattr(x, "_scale", None) is not None and not x._per_optimizer_states:
            now = x.get_scale(), x._get_growth_tracker()
            if now == (x._init_scale, x._init_growth_tracker):
                yield x


def _family(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _family(below)
