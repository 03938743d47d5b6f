"""Sizes in bytes as people write them, and the memory of common GPUs."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import UserError, nearest

GiB = 2**30
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


class Card(NamedTuple):
    """Bytes of memory, and whether the card computes in bfloat16 (NVIDIA's do from Ampere on)."""

    memory: int
    bfloat16: bool = True


# memory as sold; drivers report up to 3 % less
CARDS: dict[str, Card] = {
    **{name: Card(size, bfloat16=False) for name, size in {
        "t4": 16 * GiB, "p100": 16 * GiB, "v100-16gb": 16 * GiB, "v100-32gb": 32 * GiB,
    }.items()},
    **{name: Card(size) for name, size in {
        "rtx-3060": 12 * GiB, "rtx-3070": 8 * GiB, "rtx-3080": 10 * GiB, "rtx-3090": 24 * GiB,
        "rtx-4060": 8 * GiB, "rtx-4060-ti-16gb": 16 * GiB, "rtx-4070": 12 * GiB, "rtx-4080": 16 * GiB,
        "rtx-4090": 24 * GiB, "rtx-5070": 12 * GiB, "rtx-5080": 16 * GiB, "rtx-5090": 32 * GiB,
        "rtx-a6000": 48 * GiB, "rtx-6000-ada": 48 * GiB, "rtx-pro-6000": 96 * GiB,
        "l4": 24 * GiB, "a10": 24 * GiB, "a10g": 24 * GiB, "l40s": 48 * GiB, "a40": 48 * GiB,
        "a100-40gb": 40 * GiB, "a100-80gb": 80 * GiB, "h100": 80 * GiB, "gh200": 96 * GiB, "h200": 141 * 10**9,
        "b200": 180 * GiB, "b300": 288 * 10**9,
        "mi250x-gcd": 64 * GiB, "mi300x": 192 * GiB, "mi325x": 256 * 10**9, "mi355x": 288 * 10**9,
    }.items()},
}  # fmt: skip


def memory(text: str) -> int:
    """Bytes of a card's name or a size: what `card` finds.

    >>> memory("24GB"), memory("24 GiB"), memory("24000MB"), memory("RTX 3090")
    (24000000000, 25769803776, 24000000000, 25769803776)
    """
    return card(text).memory


def card(text: str) -> Card:
    """The card of a name or a size; GB are 10^9 bytes, GiB 2^30. Of a size alone it is taken to have bfloat16.

    Raises:
        UserError: neither a known card nor a positive size.

    >>> card("T4").bfloat16, card("v100-32gb").bfloat16, card("16GB").bfloat16
    (False, False, True)
    """
    name = re.sub(r"[\s_-]+", "-", text.strip().lower())
    name = re.sub(r"^(nvidia|geforce|amd|instinct)-", "", name)
    if name in CARDS:
        return CARDS[name]
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if found and found[2] in UNITS:
        size = int(min(float(found[1]) * UNITS[found[2]], 2**63))
        if size == 2**63:
            raise UserError(f"no GPU has {text.strip()[:40]!r}: give a size such as 24GB")
        if not found[2] and size < 10**6:
            named = [known for known in CARDS if name in known.split("-")]
            hint = f"did you mean {' or '.join(named)}? or " if named else ""
            raise UserError(f"a GPU of {size} bytes? {hint}give a unit: {text.strip()}GB or {text.strip()}GiB")
        if size > 0:
            return Card(size)
    if found and found[2] not in UNITS:
        raise UserError(f"unknown unit in {text!r}: use MB, GB (10^9 bytes), MiB or GiB (2^30 bytes)")
    near = nearest(name, CARDS)
    hint = f"did you mean {near}? " if near else ""
    raise UserError(f"unknown GPU or size {text!r}: {hint}give a size such as 24GB, or one of {', '.join(CARDS)}")
