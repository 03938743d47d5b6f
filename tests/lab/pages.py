"""Run folders as a report finds them, and pages as a browser shows them."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from foamlab.runs.record import Recorder

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def make_run(
    folder: Path,
    optimizer: str = "foam",
    final: float = 1.5,
    *,
    steps: int = 400,
    done: int | None = None,
    seed: int = 0,
    lr: float = 0.01,
    state: float = 2.5e6,
    status: str = "done",
    evals: bool = True,
    nan_at: int | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A run folder as `foamlab train` writes it; the loss falls from 8 to about `final`."""
    folder.mkdir(parents=True)
    config = {
        "model": {"name": "llama-1m"},
        "data": {"name": "stdlib", "tokenizer": "bpe:4096", "sequence": 128, "cache": str(folder)},
        "optimizer": {"name": optimizer, "lr": lr, "options": {}},
        "train": {"steps": steps, "batch": 16, "seed": seed, "eval_tokens": 65536},
        "out": str(folder),
    }
    for key, value in (settings or {}).items():
        group, name = key.split(".")
        config[group][name] = value  # type: ignore[index]
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    recorder = Recorder(folder)
    recorder.describe(
        command="foamlab train preset",
        versions={"python": "3.11.7", "torch": "2.13.0"},
        hardware={"processor": "a processor", "cores": 2},
        model={"name": "llama-1m", "parameters": 1_000_000},
        optimizer={"name": optimizer, "lr": lr},
        bytes={"weights": 4e6, "gradients": 4e6, "state": state, "peak": 6.1e8},
    )
    for step in range(1, (steps if done is None else done) + 1):
        noise = 0.1 * math.sin(12.9898 * step + seed)
        loss = math.nan if nan_at == step else final + (8 - final) * math.exp(-6 * step / steps) + noise
        common = {"step": step, "tokens": step * 2048, "seconds": step * 0.1}
        if nan_at == step:
            recorder.write({"kind": "skip", **common, "why": "loss is nan"})
        rate = lr * min(step / steps * 10, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        recorder.write({"kind": "train", **common, "loss": loss, "lr": rate, "grad_norm": 1 + abs(noise) * 9})
        if evals and step % (steps // 4) == 0:
            loss = final + (8 - final) * math.exp(-6 * step / steps)
            recorder.write({"kind": "eval", **common, "loss": loss, "perplexity": math.exp(loss)})
    recorder.close(status)
    return folder


class Text(HTMLParser):
    """Tags, their attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._raw = "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._raw = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._raw else data + " "


PROBE = """<script>
const problems = [];
addEventListener("error", (e) => problems.push(e.message));
addEventListener("securitypolicyviolation", (e) => problems.push("blocked " + e.blockedURI));
const crosses = (a, b, room = 0) => {
  const [p, q] = [a, b ?? document.head].map((e) => e.getBoundingClientRect());
  return p.left < q.right && q.left < p.right && p.top + room < q.bottom && q.top + room < p.bottom;
};
const overlapping = (h) => {
  const texts = [...h.querySelectorAll(".xtick text, .ytick text, .annotation text")].filter((t) => t.textContent);
  const pairs = texts.flatMap((a, i) => texts.slice(i + 1).filter((b) => crosses(a, b, 3)).map((b) => [a, b]));
  return pairs.map((pair) => pair.map((t) => t.textContent).join(" on "));
};
drawn.then(async () => {
  document.querySelector("[data-axis=tokens]")?.click();
  document.querySelector(".log")?.click();
  document.querySelector(".chip")?.click();
  await new Promise((done) => setTimeout(done, 500));
  const wide = document.documentElement.clientWidth;
  const outside = [...document.querySelectorAll("body *")].filter((e) => !e.closest(".scroll table, script"))
    .filter((e) => e.getBoundingClientRect().right > wide + 1).map((e) => e.tagName + "." + e.className);
  const charts = holders.map((h) => ({
    name: h.dataset.chart,
    traces: h.querySelectorAll(".scatterlayer .trace path.js-line, .barlayer .trace .point").length,
    marks: h.querySelectorAll(".scatterlayer .point, .barlayer .point, .heatmaplayer image").length,
    overlaps: overlapping(h),
    title: h.querySelector(".xtitle")?.textContent,
    crossed: [...h.querySelectorAll(".ytick text")].filter((t) => crosses(t, h.querySelector(".ytitle"))).length,
    height: chartOf(h).getBoundingClientRect().height,
    svg: h.querySelector("svg.main-svg").getBoundingClientRect().width / chartOf(h).getBoundingClientRect().width,
  }));
  const result = { problems, wide, scroll: document.documentElement.scrollWidth, outside, charts };
  parent.postMessage(JSON.stringify(result), "*");
});
</script></body>"""


# A browser's window is never narrower than 500 px, so the page is opened in frames of both widths.
FRAMES = """<body style="margin:0"><script>
const seen = [];
addEventListener("message", (e) => {
  if (seen.push(JSON.parse(e.data)) === 2) document.body.setAttribute("data-probe", JSON.stringify(seen));
});
</script><iframe src="page.html" width="1280" height="900"></iframe><iframe src="page.html" width="390" height="900">
</iframe></body>"""


def browse(path: Path, profile: Path) -> list[dict[str, Any]]:
    """Open the page, fail on any console message, and return what the probes found."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --dump-dom"
    command = [
        str(CHROMIUM),
        *flags.split(),
        "--virtual-time-budget=20000",
        f"--user-data-dir={profile}",
        path.as_uri(),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    errors = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    assert not errors, errors
    found = re.search(r'data-probe="([^"]*)"', ran.stdout)
    assert found, ran.stdout[-300:] + ran.stderr[-2000:]
    return json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))
