"""FOAM, the `torch.optim.Optimizer`: groups, state, step, save and load.

This room owns when a step happens and what is kept between steps. It does no arithmetic (`rules.py`, `kernels/`) and
does not decide which parameters fold (`groups.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .fold import residual_ratio
from .groups import check_there, param_groups, split_by_shape
from .kernels import BACKENDS, Slot, choose, imagined, whole
from .options import check, check_choices, check_options, hyper, known_value
from .rules import Hyper
from .saved import FORMAT, match, upgraded
from .state import check_kept, new_state

# The authors' rule and their recipe for pre-training, for FOAM(model, **PAPER): a base rate for embeddings, head and
# norms, a quarter of it for the folded matrices (docs/choosing.md).
PAPER: dict[str, Any] = {
    "lr": 1e-2, "level": 2, "scale": 0.25, "betas": (0.9, 0.999), "weight_decay": 0.0,
    "bias_correction": "whole", "residual_in_v": 1.0,
}  # fmt: skip

# a group's scalars and rule, the name of a backend, and what that backend has to step of it
Work = tuple[Hyper, str, str, list[Slot]]


class FOAM(Optimizer):
    """Adam whose two moments are kept as means over blocks of 2**level entries of a row.

        m <- beta1 m + (1 - beta1) fold(g)         M = unfold(m) / (1 - beta1^t) + residual * r
        v <- beta2 v + (1 - beta2) fold(g^2)       V = unfold(v) / (1 - beta2^t) + residual_in_v * (residual * r)^2
        p <- p - lr * weight_decay * p             r = g - unfold(fold(g))
        p <- p - lr * scale * M / (sqrt(V) + eps)

    Args:
        params: a module (embeddings, head, norms and biases stay plain Adam: `param_groups`); tensors or (name, tensor)
            pairs (matrices fold, the rest does not); or group dicts, where a group that states its own `level`
            is taken as it is.
        lr: learning rate, a float or a 0-dim tensor. AdamW's own value is the right start while `scale` is 1.
        betas, eps, weight_decay, maximize: as in torch.optim.AdamW.
        level: fold level of what folds: 0 is AdamW, 2 (blocks of 4) the paper's choice, "row" one value a row.
        rule: "adam"; "mini" keeps one second moment a row (Adam-mini); "muon" orthogonalises the restored momentum
            (torch.optim.Muon, whose `lr` it takes). Like `level`, it is for what folds; the rest stays Adam.
        scale: alpha, multiplies lr for folded groups only.
        residual: rho, how much of the residual returns to each weight; 0 is the ablation.
        second_moment: "mean_square" = fold(g^2) (default) or "square_mean" = fold(g)^2 (the paper's text).
        bias_correction: "moments" divides the averages m and v alone, so that the residual has its full size from the
            first step; "whole" divides M and V, residual included, as the paper does (docs/algorithm.md).
        residual_in_v: kappa, how much of the residual's square V gets: 0 gives Adam's expected step, more bounds a
            step by 1 / sqrt(kappa) rates; 1 is the paper's. Of rule "adam".
        state: how moments are kept: "float32" (float64 for float64 parameters), "bfloat16", "int8" (matrices only:
            8-bit codes, 1/32 byte more for their scale), or "param" (as the parameter).
        stochastic: round bfloat16 parameters, bfloat16 moments and codes stochastically (seeded by `seed`, repeatable
            on resume); False rounds to nearest, which freezes them (docs/algorithm.md).
        momentum, nesterov, adjust_lr: of rule "muon", as `momentum`, `nesterov`, `adjust_lr_fn` of torch.optim.Muon.
        capturable: keep `step` on the parameter's device, as CUDA graphs need.
        backend: None takes the fastest that works for each parameter; a name takes that one or raises with the reason.

    All of these but `backend` may be given per group. State exists from construction on: `step` [], and m, v of shape
    [*lead, W], W = ceil(C / 2**level).

    Raises:
        ValueError: nonsense hyperparameters, complex parameters, an unknown backend, or nothing to fold.

    >>> w = nn.Parameter(torch.ones(2, 8))
    >>> opt = FOAM([w], lr=0.1, level=2, weight_decay=0.0)
    >>> w.sum().backward(); _ = opt.step()
    >>> tuple(opt.state[w]["m"].shape), w[0, 0].item()
    ((2, 2), 0.8999999761581421)
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        level: int | str = 2,
        rule: str = "adam",
        scale: float = 1.0,
        residual: float = 1.0,
        second_moment: str = "mean_square",
        bias_correction: str = "moments",
        residual_in_v: float = 0.1,
        state: str = "float32",
        stochastic: bool = True,
        seed: int = 0,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr: str = "original",
        maximize: bool = False,
        capturable: bool = False,
        backend: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "level": level, "rule": rule, "scale": scale, "residual": residual, "second_moment": second_moment,
            "bias_correction": bias_correction, "residual_in_v": residual_in_v,
            "state": state, "stochastic": stochastic, "seed": seed,
            "momentum": momentum, "nesterov": nesterov, "adjust_lr": adjust_lr,
            "maximize": maximize, "capturable": capturable, "format": FORMAT,
        }  # fmt: skip
        if backend is not None:
            known_value("backend", backend, BACKENDS)
        self.backend = backend
        check(defaults)
        if isinstance(params, nn.Module):
            params = param_groups(params, level=level, scale=scale, rule=rule)
        elif not isinstance(params, (Tensor, dict)):
            params = [{"params": params}] if isinstance(params, set) else list(params)
        super().__init__(params, defaults)
        asked = level != 0 and not any(isinstance(g, dict) and "level" in g for g in params)
        if asked and not any(g["level"] != 0 for g in self.param_groups):
            raise ValueError(
                f"nothing folds: level={level!r} was asked for, but no parameter is a matrix; "
                "use level=0 for plain AdamW, or give the group its own level"
            )

    # ------------------------------------------------------------------ groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. A group without a `level` of its own is split: matrices fold, the rest is plain Adam."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        params = param_group["params"]
        if isinstance(params, set):
            raise TypeError("parameters must come in an order that is the same in every run, not in a set")
        params = [params] if isinstance(params, Tensor) else list(params)
        if self.param_groups and "param_names" in self.param_groups[0]:  # then torch wants names of all
            here = sum(len(g["params"]) for g in self.param_groups)
            params = [x if isinstance(x, tuple) else (f"unnamed.{i}", x) for i, x in enumerate(params, here)]
        groups = split_by_shape({**param_group, "params": params}, self.defaults)
        for group in groups:  # all is checked before anything is added
            self._check_group(group)
        n = len(self.param_groups)
        try:
            for group in groups:
                super().add_param_group(group)
        except Exception:
            del self.param_groups[n:]
            raise
        for group in self.param_groups[n:]:
            for p in group["params"]:
                if p.requires_grad:
                    self.state[p] = new_state(p, group)

    def _check_group(self, group: dict[str, Any]) -> None:
        merged = {**self.defaults, **group}
        check_options((k for k in group if k not in ("params", "name", "param_names", "format")), misspelt_only=True)
        check(merged)
        for p in (item[1] if isinstance(item, tuple) else item for item in group["params"]):
            if not isinstance(p, Tensor) or (isinstance(p, nn.Parameter) and not p.requires_grad):
                continue  # torch says what it is; frozen parameters may be of any kind (quantised weights are integers)
            check_there(p)
            if p.is_complex() or not p.is_floating_point() or p.layout != torch.strided:
                raise ValueError(
                    f"FOAM needs dense, real, floating-point parameters, got {p.dtype} ({p.layout}) "
                    f"of shape {tuple(p.shape)}"
                )
            if merged["rule"] == "muon" and p.ndim < 2:
                raise ValueError(
                    f"cannot use rule 'muon' on shape {tuple(p.shape)}: only matrices can be orthogonalised"
                )
            # where what is only planned will live is not known yet; `step` asks again
            if (self.backend is not None or not whole(p)) and not imagined(p):
                choose(self.backend, p, merged)

    def _ensure_state(self, all_parameters: bool = False) -> None:
        """Create the state of parameters that were swapped in or unfrozen later, move that of parameters that moved to
        another device, drop that of parameters that left."""
        ours = set()
        for group in self.param_groups:
            ours.update(group["params"])
            for p in group["params"]:
                mine = self.state.get(p)
                if mine and mine["m"].device != p.device:
                    moves = {k: x for k, x in mine.items() if k != "step" or group["capturable"]}
                    # a meta tensor has nothing to move
                    mine = {} if mine["m"].is_meta else mine | {k: x.to(p.device) for k, x in moves.items()}
                    self.state[p] = mine
                if not mine and (p.requires_grad if all_parameters else p.grad is not None):
                    self.state[p] = new_state(p, group)
        if not self.state.keys() <= ours:
            for p in self.state.keys() - ours:
                del self.state[p]

    def state_bytes(self) -> int:
        """Bytes of all optimizer state, exactly as allocated (also on the meta device)."""
        return sum(x.numel() * x.element_size() for s in self.state.values() for x in s.values())

    # ------------------------------------------------------------------ step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform one step. `closure`, if given, recomputes the loss (with gradients enabled) and is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ensure_state()
        # all gradients are looked at before any weight changes
        work, number = [], 0
        for group in self.param_groups:
            work += self._work(group, enumerate(group["params"], number))
            number += len(group["params"])
        self._perform(work)
        return loss

    @torch.no_grad()
    def step_parameter(self, p: Tensor, group: dict[str, Any], number: int) -> None:
        """Step `p` of `group` alone; it is the optimizer's parameter `number`, counted over all groups."""
        if not self.state.get(p):  # unfrozen since construction
            self.state[p] = new_state(p, group)
        self._perform(self._work(group, [(number, p)]))

    def check_ready(self) -> None:
        """Raise what a step of any parameter would raise for its options or its state, whatever its gradient."""
        for group in self.param_groups:
            check_choices(group)
            hyper(group)
            widths: dict[int, dict[str, int]] = {}
            for p in group["params"]:
                if p.numel() and (kept := self.state.get(p)):
                    check_kept(p, kept, group, widths)

    def _work(self, group: dict[str, Any], params: Iterable[tuple[int, Tensor]]) -> list[Work]:
        """What a step has to do for these (number, parameter) pairs of one group: a list of slots for each backend."""
        check_choices(group)  # someone may have changed the group since
        h = hyper(group)
        slots: dict[str, list[Slot]] = {}
        chosen: dict[tuple[Any, ...], list[Slot]] = {}
        widths: dict[int, dict[str, int]] = {}
        for i, p in params:
            if (g := p.grad) is None:
                continue
            if g.layout != torch.strided:
                raise RuntimeError(
                    f"FOAM cannot use sparse gradients (parameter of shape {tuple(p.shape)}): "
                    "build the embedding with sparse=False, or give it to torch.optim.SparseAdam"
                )
            if p.numel():
                kept = self.state[p]
                check_kept(p, kept, group, widths)
                kind = (p.device, p.dtype, p.ndim, p.is_contiguous(), type(p), type(g), *map(type, kept.values()))
                if kind not in chosen:
                    backend = choose(self.backend, p, group, (g, *kept.values()))
                    chosen[kind] = slots.setdefault(backend.name, [])
                chosen[kind].append(Slot(p, g, kept, i))
        return [(h, group["rule"], name, batch) for name, batch in slots.items()]

    def _perform(self, work: list[Work]) -> None:
        for h, rule, backend, slots in work:
            torch._foreach_add_([slot.state["step"] for slot in slots], 1)
            BACKENDS[backend].update(slots, h, rule)

    # ------------------------------------------------------------------ diagnostics

    @torch.no_grad()
    def residual_ratio(self) -> dict[str, float]:
        """delta = |g - unfold(fold(g))| / |g| of every folded parameter that has a gradient now, in [0, 1].

        How much of the gradient folding leaves to the residual: 0 for a gradient constant over each block,
        sqrt(1 - 1/B) for one without structure. Call it between backward() and step(); it costs nothing otherwise.
        Keys are parameter names where the groups hold them, else numbers.
        """
        ratios, number = {}, 0
        for group in self.param_groups:
            names = group.get("param_names") or [str(number + i) for i in range(len(group["params"]))]
            number += len(group["params"])
            for name, p in zip(names, group["params"]):
                if group["level"] != 0 and p.grad is not None:
                    ratios[name] = residual_ratio(p.grad, group["level"])
        return ratios

    # ------------------------------------------------------------------ save and load

    def state_dict(self) -> dict[str, Any]:
        """As of every torch optimizer; complete also right after parameters were swapped."""
        self._ensure_state(all_parameters=True)
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("backend", None)
        for group in (self.defaults, *self.param_groups):
            group.update(upgraded(group))
        for kept in self.state.values():
            kept["step"] = kept["step"].to(torch.int32)  # float32 in format 1

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` gave, bit for bit, into the tensors this optimizer already holds.

        Everything is checked before anything changes. Dtypes are kept (torch's own method would cast moments to the
        parameter's dtype), and nothing is shared with `state_dict` afterwards. Learning rates, betas and the like
        are taken from `state_dict`, as with every torch optimizer.

        Raises:
            ValueError: another number of groups or parameters, or another shape, level, rule, second moment or kind
                of state; both values are named and nothing has been loaded.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"not an optimizer state dict but a {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        for pre in list(self._optimizer_load_state_dict_pre_hooks.values()):
            state_dict = pre(self, state_dict) or state_dict
        plan = match(self, state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            kept = {k: deepcopy(v) for k, v in upgraded(saved).items() if k not in ("params", "param_names")}
            if isinstance(lr := group["lr"], Tensor):  # CUDA graphs and compiled steps read this very tensor
                kept["lr"] = lr.copy_(torch.as_tensor(kept.get("lr", lr)))
            group.update(kept)
        self._ensure_state()
        for p, group, saved in plan:
            mine = self.state[p] if self.state.get(p) else new_state(p, group)
            if saved or self.state.get(p):
                self.state[p] = mine
            for name, x in mine.items():
                x.copy_(saved[name]) if saved else x.zero_()
        for post in list(self._optimizer_load_state_dict_post_hooks.values()):
            post(self)
