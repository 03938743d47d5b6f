"""FOAM, the `torch.optim.Optimizer`: groups, state, step, save and load.

This room owns when a step happens and what is kept between steps. It does no arithmetic (`rules.py`, `kernels/`) and
does not decide which parameters fold (`groups.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .fold import Level, residual_ratio
from .groups import UNNAMED, check_kind, param_groups, split_by_shape, warn_once
from .kernels import BACKENDS, Backend, Slot, choose, here, perform
from .memory import check_held, imagined, whole
from .options import OPTIONS, Options, check, check_names, hyper, unknown, unread
from .rates import Rates
from .saved import FORMAT, load, upgraded
from .shard import in_process_group, is_sharded, local, whole_tensor
from .state import check_kept, fits, follow, new_state
from .values import known_value

# The authors' rule and their recipe for pre-training, for FOAM(model, **PAPER): a base rate for embeddings, head and
# norms, a quarter of it for the folded matrices (docs/choosing.md). FOAM(model, **PAPER | {"weight_decay": 0.1}) is the
# same with another decay.
PAPER: dict[str, Any] = {
    "lr": 1e-2, "level": 2, "scale": 0.25, "betas": (0.9, 0.999), "weight_decay": 0.0,
    "bias_correction": "whole", "residual_in_v": 1.0,
}  # fmt: skip

# a group's options, a backend, and what that backend has to step of the group
Work = tuple[Options, Backend, list[Slot]]


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
        lr: learning rate, a float or a 0-dim tensor, of which each of several groups gets a copy: write to
            `group["lr"]`, not to what was given. AdamW's own value is the right start while `scale` is 1.
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
        stochastic, seed: round bfloat16 parameters, bfloat16 moments and codes stochastically, with noise seeded by
            `seed` (repeatable on resume); False rounds to nearest, which freezes them (docs/algorithm.md).
        momentum, nesterov, adjust_lr: of rule "muon", as `momentum`, `nesterov`, `adjust_lr_fn` of torch.optim.Muon.
        capturable: keep `step` on the parameter's device, as CUDA graphs need.
        backend: None takes the fastest that works for each parameter; a name takes that one or raises with the reason.

    All of these but `backend` may be given per group. State exists from construction on: `step` [], and m, v of shape
    [*lead, W], W = ceil(C / 2**level). Of sharded parameters (FSDP2, tensor parallelism) these are DTensors, sharded
    alike, and a step has the same bits as in one process (docs/sharding.md); make the optimizer after sharding.

    Raises:
        ValueError: nonsense hyperparameters, complex or lazy parameters, those of FSDP1, an unknown backend, or a
            module in which nothing folds.

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
        level: Level = 2,
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
        **foreign: NoReturn,
    ) -> None:
        given = locals()
        if foreign:
            raise TypeError(unknown(next(iter(foreign)), (*OPTIONS, "backend")))
        defaults = {name: given[name] for name in OPTIONS} | {"format": FORMAT}
        if backend is not None:
            known_value("backend", backend, BACKENDS)
        self.backend = backend
        self._rates = Rates()
        check(defaults)
        if isinstance(params, nn.Module):
            params = param_groups(params, level=level, scale=scale, rule=rule)
        elif not isinstance(params, (Tensor, dict)):
            params = [{"params": params}] if isinstance(params, set) else list(params)
        super().__init__(params, defaults)
        asked = level != 0 and not any(isinstance(g, dict) and "level" in g for g in params)
        several = sum(len(g["params"]) for g in self.param_groups) > 1  # of a dictionary of optimizers, one each
        if asked and several and not any(g["level"] != 0 for g in self.param_groups):
            warn_once(
                f"nothing folds: level={level!r} was asked for, but no parameter is a matrix, so this FOAM is AdamW; "
                "level=0 says so, or give the group its own level"
            )
        rules = {g["rule"] for g in self.param_groups}
        known = " nor ".join(map(repr, sorted(rules)))
        for group in (defaults, *self.param_groups):
            for name in unread(group, rules):
                warn_once(f"{name}={group[name]!r} has no effect: rule {known} does not read it")

    # ------------------------------------------------------------------ groups and state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. A group without a `level` of its own is split: matrices fold, the rest is plain Adam."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        params = param_group["params"]
        if isinstance(params, set):
            raise TypeError("parameters must come in an order that is the same in every run, not in a set")
        params = [params] if isinstance(params, Tensor) else list(params)
        if (names := param_group.get("param_names")) and not any(isinstance(x, tuple) for x in params):
            if len(names) != len(params):  # groups of another optimizer, of which some were taken
                raise ValueError(f"a group of {len(params)} parameters has {len(names)} names")
            params = list(zip(names, params))
        if self.param_groups and "param_names" in self.param_groups[0]:  # then torch wants names of all
            here = sum(len(g["params"]) for g in self.param_groups)
            params = [x if isinstance(x, tuple) else (f"{UNNAMED}{i}", x) for i, x in enumerate(params, here)]
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
        self._rates.part(self.param_groups)
        for group in self.param_groups[n:]:
            for p in group["params"]:
                if p.requires_grad:
                    self.state[p] = new_state(p, group)

    def _check_group(self, group: dict[str, Any]) -> None:
        merged = {**self.defaults, **group}
        check_names((k for k in group if k not in ("params", "name", "param_names", "format")), misspelt_only=True)
        check(merged)
        for p in (item[1] if isinstance(item, tuple) else item for item in group["params"]):
            if not isinstance(p, Tensor) or (isinstance(p, nn.Parameter) and not p.requires_grad):
                continue  # torch says what it is; frozen parameters may be of any kind (quantised weights are integers)
            check_kind(p, merged["rule"])
            p = local(p)
            # where what is only planned will live is not known yet; `step` asks again
            if (self.backend is not None or not whole(p)) and not imagined(p):
                choose(self.backend, p, merged)

    def _ensure_state(self, all_parameters: bool = False) -> None:
        """Create the state of parameters that were swapped in or unfrozen later; the rest follows its parameter."""
        for group in self.param_groups:
            check(group, read=False)  # someone may have changed it since
        for group in self.param_groups:
            for p in group["params"]:
                mine = self.state.get(p)
                if all_parameters or not mine or mine["m"].device != p.device:
                    self._keep(p, group, p.requires_grad if all_parameters else p.grad is not None)

    def _keep(self, p: Tensor, group: dict[str, Any], make: bool) -> None:
        """Let the state of p be where and as p is; `make` it if there is none."""
        mine = self.state.get(p)
        now = follow(p, mine, group) if mine else {}
        if not now and make:
            now = new_state(p, group)
        if now is not mine and (now or mine):
            self.state[p] = now

    def state_bytes(self) -> int:
        """Bytes of all optimizer state, exactly as allocated (also on the meta device); on this rank, if sharded."""
        return sum(local(x).nbytes for s in self.state.values() for x in s.values())

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
        self._rates.check()
        self._ensure_state()
        # all gradients are looked at before any weight changes
        work, number = [], 0
        for group in self.param_groups:
            work += self._work(group, enumerate(group["params"], number))
            number += len(group["params"])
        for h, backend, slots in work:
            perform(backend, slots, h)
        if not work:
            self._check_orphaned()
        return loss

    def _check_orphaned(self) -> None:
        """Warn once if no gradient has ever come: the model may have other tensors now, as sharding gives it."""
        steps = [kept["step"] for kept in self.state.values()]
        if in_process_group() and steps and not any(x.is_meta or x.item() for x in steps):
            warn_once(
                "no parameter of this optimizer has ever had a gradient, so nothing is trained. If the model was "
                "sharded (fully_shard, parallelize_module, FSDP) after the optimizer was made, its weights are other "
                "tensors now: make the optimizer after that"
            )

    @torch.no_grad()
    def step_parameter(self, p: Tensor, group: dict[str, Any], number: int) -> None:
        """Step `p` of `group` alone; it is the optimizer's parameter `number`, counted over all groups."""
        check(group, read=False)
        self._keep(p, group, make=True)
        for h, backend, slots in self._work(group, [(number, p)]):
            perform(backend, slots, h)

    def check_ready(self) -> None:
        """Raise what a step of any parameter would raise for its options or its state, whatever its gradient."""
        for group in self.param_groups:
            check(group, read=False)
            for p in group["params"]:
                if p.numel() and self.state.get(p):
                    self._keep(p, group, make=False)
                    check_kept(p, self.state[p], group)

    def _work(self, group: dict[str, Any], params: Iterable[tuple[int, Tensor]]) -> list[Work]:
        """What a step has to do for these (number, parameter) pairs of one group: a list of slots for each backend."""
        h = hyper(group)
        slots: dict[Backend, list[Slot]] = {}
        chosen: dict[tuple[Any, ...], Backend] = {}
        wanted: dict[tuple[Any, ...], Any] = {}
        together: list[Work] = []  # collective calls, in the order that is the same on all ranks
        for i, p in params:
            if (g := p.grad) is None:
                continue
            if g.layout != torch.strided:
                raise RuntimeError(
                    f"FOAM cannot use sparse gradients (parameter of shape {tuple(p.shape)}): "
                    "build the embedding with sparse=False, or give it to torch.optim.SparseAdam"
                )
            if p.numel():
                if not fits(p, self.state[p], group, wanted):
                    self._keep(p, group, make=True)  # it may have been recast
                    check_kept(p, self.state[p], group)
                slot = Slot(p, g, self.state[p], i)
                if is_sharded(p):
                    slot = here(slot, group)
                p, g, kept, _, part = slot
                kind = (p.device, p.dtype, p.ndim, p.is_contiguous(), type(p), type(g), *map(type, kept.values()))
                if kind not in chosen:
                    chosen[kind] = choose(self.backend, p, group, (g, *kept.values()))
                check_held(p, g, kept)
                if part and part.joins:
                    together.append((h, chosen[kind], [slot]))
                else:
                    slots.setdefault(chosen[kind], []).append(slot)
        return [*((h, backend, batch) for backend, batch in slots.items()), *together]

    # ------------------------------------------------------------------ diagnostics

    @torch.no_grad()
    def residual_ratio(self) -> dict[str, float]:
        """delta = |g - unfold(fold(g))| / |g| of every folded parameter that has a gradient now, in [0, 1].

        How much of the gradient folding leaves to the residual: 0 for a gradient constant over each block,
        sqrt(1 - 1/B) for one without structure. Call it between backward() and step(); it costs nothing otherwise. Of
        sharded gradients each is gathered: all ranks must call.
        Keys are parameter names where the groups hold them, else numbers.
        """
        ratios, number = {}, 0
        for group in self.param_groups:
            names = group.get("param_names") or [str(number + i) for i in range(len(group["params"]))]
            number += len(group["params"])
            for name, p in zip(names, group["params"]):
                if group["level"] != 0 and p.grad is not None:
                    ratios[name] = residual_ratio(whole_tensor(p.grad), group["level"])
        return ratios

    # ------------------------------------------------------------------ save and load

    def state_dict(self) -> dict[str, Any]:
        """As of every torch optimizer; complete also right after parameters were swapped.

        The state of parameters that have left is dropped here and not in `step`: DeepSpeed's ZeRO hides all groups but
        one from a step.
        """
        self._ensure_state(all_parameters=True)
        for p in self.state.keys() - {p for group in self.param_groups for p in group["params"]}:
            del self.state[p]
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("backend", None)
        self.__dict__.setdefault("_rates", Rates())
        for group in (self.defaults, *self.param_groups):
            group.update(upgraded(group))
        for kept in self.state.values():
            kept["step"] = kept["step"].to(torch.int32)  # float32 in format 1

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` gave, bit for bit, into the tensors this optimizer already holds.

        Everything is checked before anything changes. Within a group, names decide which state is whose where both
        sides have them, in any order and through torch's wrappers (DDP, compile, FSDP, checkpointing); else the order
        does. Dtypes are kept (torch's own method would cast moments to the parameter's dtype), and nothing is shared
        with `state_dict` afterwards. Learning rates, betas and the like are taken from it, as torch's optimizers do.

        Raises:
            ValueError: other groups, names, shapes or kinds of parameters; another level, rule, second moment or kind
                of state; options that make no sense; moments that are no plain tensors, or NaN. Both sides are named
                where there are two, and nothing has been loaded.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"not an optimizer state dict but a {type(state_dict).__name__}")
        state_dict = dict(state_dict)
        for pre in list(self._optimizer_load_state_dict_pre_hooks.values()):
            state_dict = pre(self, state_dict) or state_dict
        self._ensure_state(all_parameters=True)
        load(self, state_dict)
        self._ensure_state(all_parameters=True)  # `capturable` may have changed
        for post in list(self._optimizer_load_state_dict_post_hooks.values()):
            post(self)
