"""The adam rule as Triton kernels: what runs on the GPU. `triton.py` decides what is launched, and with what.

One launch steps many tensors. `table` is int64 [FIELDS, SLOTS], a column a tensor; its fields are

    0 first program   1 p   2 g   3 m   4 v   5 step (addresses)   6 noise number   7 C   8 W   9 B
    10 number of p's first element in the whole parameter   11 from one row's first to the next's   12, 13 the same of m

A program finds its tensor by counting the first programs not above its own number. Each reads g and p once, writes p
once, and reads and writes its folded entries once. This room imports triton: import it only when a step is performed.
"""

# mypy: disable-error-code="no-untyped-def"
# (arguments of a kernel are tensors, pointers or constants as the compiler sees fit)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    # lowbias32, as quant.mix; x is uint32
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D).to(tl.uint32)
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B).to(tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _key(seed, t, number, stream: tl.constexpr):
    # quant.noise_key; `seed` is mixed already
    salt = _mix(seed.to(tl.uint32, bitcast=True) ^ t.to(tl.uint32))
    return _mix(salt ^ (4 * number + stream).to(tl.uint32))


@triton.jit
def _close(x, key, element, dtype: tl.constexpr, STOCHASTIC: tl.constexpr):
    # float32 -> storage. bfloat16: add below the mantissa, then cut; noise as quant.round_stochastic, or half an ulp
    # and ties to even (by hand, as Triton's interpreter would only cut). Infinities survive the sum, NaN would not.
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        if STOCHASTIC:
            word = _mix(key ^ (element >> 1).to(tl.uint32))  # shared by an even element and the odd one after it
            bits += tl.where((element & 1) != 0, word >> 16, word & 0xFFFF)
        else:
            bits += ((bits >> 16) & 1) + 0x7FFF
        bits = tl.where(x == x, bits, 0x7FC00000)
        y = (bits >> 16).to(tl.uint16).to(dtype, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def _find(table, SLOTS: tl.constexpr):
    # the tensor this program works on, and the program's number within it
    pid = tl.program_id(0)
    starts = tl.load(table + tl.arange(0, SLOTS))
    slot = tl.sum((starts <= pid).to(tl.int32), 0) - 1
    return slot, pid - tl.load(table + slot).to(tl.int32)


@triton.jit
def _field(table, k: tl.constexpr, slot, SLOTS: tl.constexpr):
    return tl.load(table + k * SLOTS + slot)


@triton.jit
def _numbers(table, slot, SLOTS: tl.constexpr, row, inner, w):
    # the numbers, in the whole parameter, of a row's entry `inner` and of its block w: rounding noise is by them
    element = _field(table, 10, slot, SLOTS) + row * _field(table, 11, slot, SLOTS) + inner
    moment = _field(table, 12, slot, SLOTS) + row * _field(table, 13, slot, SLOTS) + w
    return element, moment


@triton.jit
def _open(table, slot, SLOTS: tl.constexpr, P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, ALIGNED: tl.constexpr):
    # where p, g, m and v begin
    p = _field(table, 1, slot, SLOTS).to(tl.pointer_type(P))
    g = _field(table, 2, slot, SLOTS).to(tl.pointer_type(G))
    m = _field(table, 3, slot, SLOTS).to(tl.pointer_type(S))
    v = _field(table, 4, slot, SLOTS).to(tl.pointer_type(S))
    if ALIGNED:
        p, g = tl.multiple_of(p, 16), tl.multiple_of(g, 16)
        m, v = tl.multiple_of(m, 16), tl.multiple_of(v, 16)
    return p, g, m, v


@triton.jit
def _clock(
    table, slot, lr, t, c1, c2, log1, log1_rest, log2, log2_rest,
    SLOTS: tl.constexpr, STEP_TENSOR: tl.constexpr, LR_TENSOR: tl.constexpr,
):  # fmt: skip
    # lr, t, 1 - beta1^t and 1 - beta2^t; float64, because 1 - 0.999^1 in float32 is off by 1e-5
    if STEP_TENSOR:
        t = tl.load(_field(table, 5, slot, SLOTS).to(tl.pointer_type(tl.int32)))
        time = t.to(tl.float64)
        c1 = (1.0 - tl.exp(time * (tl.cast(log1, tl.float64) + tl.cast(log1_rest, tl.float64)))).to(tl.float32)
        c2 = (1.0 - tl.exp(time * (tl.cast(log2, tl.float64) + tl.cast(log2_rest, tl.float64)))).to(tl.float32)
    if LR_TENSOR:
        lr = tl.load(lr).to(tl.float32)
    return lr, t, c1, c2


@triton.jit
def _moments(m, v, f, s, beta1, rest1, beta2, rest2, SQUARE_MEAN: tl.constexpr):
    # m <- beta1 m + (1 - beta1) fold(g),   v <- beta2 v + (1 - beta2) s(g)
    if SQUARE_MEAN:
        s = f * f
    s = tl.where(s > 1.7014118346046923e38, 1.7014118346046923e38, s)  # rules.LARGEST
    return beta1 * m + rest1 * f, beta2 * v + rest2 * s


@triton.jit
def _step(p, m, v, r, rho, kappa, lr, decay, c1, c2, eps, WHOLE: tl.constexpr):
    # M = m / c1 + rho r,   V = v / c2 + kappa rho^2 r^2  (WHOLE: (m + rho r) / c1 and so on)
    # p <- p - decay p - lr M / (sqrt(V) + eps)
    r = rho * r
    if WHOLE:
        M = m + r
        V = v + kappa * r * r
    else:
        M = m + c1 * r
        V = v + (kappa * c2) * r * r
    return p * (1.0 - decay) - (lr / c1) * M / (tl.sqrt(V * (1.0 / c2)) + eps)


@triton.jit(do_not_specialize=["t", "seed"])
def adam_tile(
    table, lr, t, seed, c1, c2, log1, log1_rest, log2, log2_rest,
    beta1, rest1, beta2, rest2, eps, decay, scale, rho, kappa,
    SLOTS: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    MAXIMIZE: tl.constexpr, SQUARE_MEAN: tl.constexpr, WHOLE: tl.constexpr, STOCHASTIC: tl.constexpr,
    STEP_TENSOR: tl.constexpr, LR_TENSOR: tl.constexpr,
):  # fmt: skip
    """K blocks of one row a program, BP entries each (fewer in the last), held in registers as [K, BP].

    FLAT: the tensor is one row of whole blocks. ALIGNED: addresses are multiples of 16 bytes, C of 16 entries.
    """
    slot, tile = _find(table, SLOTS)
    pp, gg, mm, vv = _open(table, slot, SLOTS, P, G, S, ALIGNED)
    number, C = _field(table, 6, slot, SLOTS), _field(table, 7, slot, SLOTS)
    lr, t, c1, c2 = _clock(table, slot, lr, t, c1, c2, log1, log1_rest, log2, log2_rest, SLOTS, STEP_TENSOR, LR_TENSOR)
    # this program's part of a row: entries [inner, inner + K BP) of it, blocks [w, w + K) of it
    if FLAT:
        j = tile.to(tl.int64) * K
        inner = j * BP
        start = inner
        element, moment = _numbers(table, slot, SLOTS, 0, inner, j)
    else:
        W = _field(table, 8, slot, SLOTS)
        parts = ((W + K - 1) // K).to(tl.int32)
        row = tile // parts
        w = ((tile - row * parts) * K).to(tl.int64)
        j = row * W + w
        inner = w * BP
        start = row * C + inner
        element, moment = _numbers(table, slot, SLOTS, row, inner, w)
    entries = tl.minimum(C - inner, K * BP).to(tl.int32)
    blocks = (entries + BP - 1) // BP
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        entries = tl.multiple_of(entries, 16)
        if FLAT and BP < 16:
            blocks = tl.multiple_of(blocks, 16 // BP)
    e = tl.arange(0, K * BP)
    k = tl.arange(0, K)
    inside = e < entries
    kept = k < blocks
    g = tl.load(gg + start + e, mask=inside, other=0.0).to(tl.float32)
    p = tl.load(pp + start + e, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(mm + j + k, mask=kept, other=0.0).to(tl.float32)
    v = tl.load(vv + j + k, mask=kept, other=0.0).to(tl.float32)
    if MAXIMIZE:
        g = -g
    if BP == 1:
        m, v = _moments(m, v, g, g * g, beta1, rest1, beta2, rest2, SQUARE_MEAN)
        p = _step(p, m, v, 0.0, 0.0, 0.0, lr * scale, lr * decay, c1, c2, eps, WHOLE)
    else:
        # masked entries are 0: sums may include them, lengths must not
        share = 1.0 / BP
        if not FLAT:
            last = blocks - 1
            share = tl.where(k < last, share, 1.0 / (entries - last * BP).to(tl.float32))
        g = tl.reshape(g, [K, BP])
        p = tl.reshape(p, [K, BP])
        f = tl.sum(g, 1) * share
        m, v = _moments(m, v, f, tl.sum(g * g, 1) * share, beta1, rest1, beta2, rest2, SQUARE_MEAN)
        p = _step(p, m[:, None], v[:, None], g - f[:, None], rho, kappa, lr * scale, lr * decay, c1, c2, eps, WHOLE)
        p = tl.reshape(p, [K * BP])
    tl.store(pp + start + e, _close(p, _key(seed, t, number, 0), element + e, P, STOCHASTIC), mask=inside)
    tl.store(mm + j + k, _close(m, _key(seed, t, number, 1), moment + k, S, STOCHASTIC), mask=kept)
    tl.store(vv + j + k, _close(v, _key(seed, t, number, 2), moment + k, S, STOCHASTIC), mask=kept)


@triton.jit(do_not_specialize=["t", "seed"])
def adam_long(
    table, lr, t, seed, c1, c2, log1, log1_rest, log2, log2_rest,
    beta1, rest1, beta2, rest2, eps, decay, scale, rho, kappa,
    SLOTS: tl.constexpr, K: tl.constexpr, BP: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    MAXIMIZE: tl.constexpr, SQUARE_MEAN: tl.constexpr, WHOLE: tl.constexpr, STOCHASTIC: tl.constexpr,
    STEP_TENSOR: tl.constexpr, LR_TENSOR: tl.constexpr,
):  # fmt: skip
    """One block a program, too long for registers: read g for its mean, then again (from L2) for the step.

    BP is the stride of both passes; K and FLAT are not used.
    """
    slot, j = _find(table, SLOTS)
    j = j.to(tl.int64)
    pp, gg, mm, vv = _open(table, slot, SLOTS, P, G, S, ALIGNED)
    number = _field(table, 6, slot, SLOTS)
    lr, t, c1, c2 = _clock(table, slot, lr, t, c1, c2, log1, log1_rest, log2, log2_rest, SLOTS, STEP_TENSOR, LR_TENSOR)
    C = _field(table, 7, slot, SLOTS)
    W = _field(table, 8, slot, SLOTS)
    B = _field(table, 9, slot, SLOTS)
    row = j // W
    inner = (j - row * W) * B
    start = row * C + inner
    element, moment = _numbers(table, slot, SLOTS, row, inner, j - row * W)
    n = tl.minimum(B, C - inner)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        n = tl.multiple_of(n, 16)
    e = tl.arange(0, BP)
    total = tl.zeros([BP], tl.float32)
    squares = tl.zeros([BP], tl.float32)
    for i in range(0, n, BP):
        g = tl.load(gg + start + i + e, mask=e < n - i, other=0.0, eviction_policy="evict_last").to(tl.float32)
        total += g
        squares += g * g
    f = tl.sum(total, 0) / n.to(tl.float32)
    if MAXIMIZE:
        f = -f
    m, v = tl.load(mm + j).to(tl.float32), tl.load(vv + j).to(tl.float32)
    s = tl.sum(squares, 0) / n.to(tl.float32)
    m, v = _moments(m, v, f, s, beta1, rest1, beta2, rest2, SQUARE_MEAN)
    key = _key(seed, t, number, 0)
    for i in range(0, n, BP):
        inside = e < n - i
        g = tl.load(gg + start + i + e, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        p = tl.load(pp + start + i + e, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if MAXIMIZE:
            g = -g
        p = _step(p, m, v, g - f, rho, kappa, lr * scale, lr * decay, c1, c2, eps, WHOLE)
        tl.store(pp + start + i + e, _close(p, key, element + i + e, P, STOCHASTIC), mask=inside)
    tl.store(mm + j, _close(m, _key(seed, t, number, 1), moment, S, STOCHASTIC))
    tl.store(vv + j, _close(v, _key(seed, t, number, 2), moment, S, STOCHASTIC))
