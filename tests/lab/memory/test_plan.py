"""What fits, what is shared and at which precision; before and after a run; input and output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from small import to_plan
from torch import nn

import foamlab
from foamlab import machine, models, settled
from foamlab.cli import main
from foamlab.config import ModelConfig, RunConfig
from foamlab.errors import UserError
from foamlab.memory import advise, simulate
from foamlab.memory.gpus import memory
from foamlab.memory.planner import Planner
from foamlab.models.language import loss_fn
from foamlab.settled import settle
from foamlab.studies import plan_check
from foamlab.studies.plan_check import check

GB = 10**9


# ---------------------------------------------------------------------------------------------- what fits


def smallest(config: RunConfig, card: int | str, **more: Any) -> Any:
    """(flags of the smallest change that fits or None, why nothing does)."""
    planner = Planner(config, card=card, **more)
    asked = planner.plan(config)
    found, why = advise.smallest_change(planner, asked)
    assert found is None or found.total <= (planner.capacity or 0)
    return (advise.flags(asked.config, found.config) if found else None), why


def test_the_smallest_change_that_fits() -> None:
    config = to_plan(batch=16, sequence=128)
    need = foamlab.plan(config).total
    assert smallest(config, need)[0] == []
    assert smallest(config, int(0.95 * need))[0] == ["--train.micro_batch 8"]
    flags, _ = smallest(to_plan(batch=1, sequence=32), 600 * 10**6 + 17 * 10**6)
    assert flags and any("release" in flag or "precision" in flag for flag in flags)
    assert not any("level" in flag for flag in flags)


def test_order_of_sacrifices() -> None:
    found = list(advise.variants(to_plan(batch=16, sequence=128)))
    changes = [advise.flags(found[0], c) for c in found]
    assert changes[0] == []
    levels = [i for i, c in enumerate(changes) if any("options.level" in flag for flag in c)]
    narrow = [i for i, c in enumerate(changes) if any("precision" in flag for flag in c)]
    again = [i for i, c in enumerate(changes) if c == ["--model.checkpointing true"]]
    assert again[0] < narrow[0] < levels[0]
    assert any("options.level row" in flag for flag in changes[-1])
    assert all(not c.train.release or (c.train.clip == 0 and c.train.clip_each) for c in found)


def test_most_rows_and_longest_sequence_fill_the_card() -> None:
    config, card = to_plan(batch=4, sequence=128, micro_batch=1), 700 * 10**6
    planner = Planner(config, card=card)

    def total(rows: int, sequence: int) -> int:
        c = replace(config, data=replace(config.data, sequence=sequence))
        return planner.plan(replace(c, train=replace(c.train, batch=max(4, 2 * rows), micro_batch=rows))).total

    rows, sequence = advise.most_rows(planner, config), advise.longest(planner, config)
    assert total(rows, 128) <= card < total(rows + 1, 128)
    assert total(1, sequence) <= card < total(1, sequence + 64)


def test_largest() -> None:
    for need, capacity, best in ((lambda n: 10 * n, 95, 9), (lambda n: n * n, 50, 7), (lambda n: 5, 5, 100)):
        assert advise.largest(need, capacity, 100) == best
    assert advise.largest(lambda n: 10, 5, 100) == 0


def test_impossible_budgets_say_why() -> None:
    assert smallest(to_plan("llama-7b"), "10GB") == (None, "nothing fits 10GB: the weights alone need 13.5 GB")
    # gradients cannot be released where several processes share the batch
    both = smallest(to_plan("llama-7b", "adamw", batch=2), "20GB", gpus=2)
    assert both == (None, "nothing fits 20GB: weights and gradients alone need 27.0 GB")


@pytest.fixture
def four_processes() -> Iterator[torch.distributed.device_mesh.DeviceMesh]:
    """This process as the first of four, of which the others are made up."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (4,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("model, checkpointing", [("llama-1m", False), ("gpt2-10m", True)])
def test_sharding_against_fsdp2(
    model: str, checkpointing: bool, four_processes: torch.distributed.device_mesh.DeviceMesh
) -> None:
    """What the first of four processes allocates in a real step, with torch's AdamW: all moments in one maximum."""
    from torch.distributed.fsdp import fully_shard

    config = to_plan(model, "adamw", checkpointing=checkpointing, batch=4)
    planned = advise.sharded(Planner(config, device="cpu"), config, 4)
    with plan_check.allocations("cpu") as peak:
        net = models.build(config.model, None, 64)
        for block in simulate.blocks_of(net) or ():
            fully_shard(block, mesh=four_processes)
        fully_shard(net, mesh=four_processes)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        ids = torch.zeros(1, 64, dtype=torch.long)
        for name in ("first", plan_check.SECOND):
            with torch.profiler.record_function(name):
                loss_fn(net, ids, ids).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert 0 <= planned / peak() - 1 < 0.08


def test_sharding_lowers_what_each_holds() -> None:
    config = to_plan("llama-1.3b", batch=8)
    planner = Planner(config)
    sizes = [planner.plan(config).total, *(advise.sharded(planner, config, n) for n in (2, 4, 8))]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > planner.plan(config).exact["weights"] / 8


def test_a_released_run_has_no_shards_and_rivals_that_keep_their_gradients() -> None:
    config = to_plan(release=True, clip=0.0, batch=1, sequence=16)
    found = advise.fit(Planner(config), config)
    rows = {row["name"]: row for row in found.rivals}
    assert not found.sharded and rows["foam"]["peak"]["gradients"] < rows["adamw"]["peak"]["gradients"]
    with pytest.raises(UserError, match=r"train\.release needs FOAM, not AdamW"):
        foamlab.plan(to_plan(optimizer="adamw", release=True, clip=0.0))
    with pytest.raises(UserError, match=r"data-parallel training \(2 processes\)"):
        foamlab.plan(to_plan(release=True, clip=0.0), gpus=2)


def test_sharded_micro_batches_add_to_shards() -> None:
    """One pass more keeps a shard of every gradient through the pass, and no more."""
    once, twice = to_plan("llama-10m", batch=4), to_plan("llama-10m", batch=8, micro_batch=1)
    planner = Planner(once, device="cpu")
    shards = planner.plan(once).exact["gradients"] / 4
    more = advise.sharded(planner, twice, 4) - advise.sharded(planner, once, 4)
    assert 0 < more <= shards


# ---------------------------------------------------------------------------------------------- equal precision


def test_moments_are_compared_at_the_precision_of_the_weights() -> None:
    for precision, state in (("bfloat16", "bfloat16"), ("mixed", None)):
        config = to_plan("llama-130m", "foam-paper", precision=precision)
        planner = Planner(config)
        rows = {row["name"]: row for row in advise.rivals(planner, planner.plan(config), False)}
        assert rows["foam"]["options"].get("state") == state and not rows["foam-int8"]["options"]
        assert rows["foam-int8"]["total"] < rows["foam"]["total"] < rows["muon"]["total"] < rows["adamw"]["total"]
        # a quarter of what folds (about two thirds of the weights), all of the rest
        assert 0.5 < rows["foam"]["state"] / rows["adamw"]["state"] < 0.56


@pytest.mark.parametrize(
    "card, precision",
    [("t4", "float32"), ("V100-16GB", "float32"), ("v100-32gb", "float32"), ("p100", "float32"),
     ("rtx-3060", "mixed"), ("h100", "mixed"), ("mi300x", "mixed"), ("16GB", "mixed"), (None, "mixed")],
)  # fmt: skip
def test_precision_is_what_train_would_take_on_that_card(
    card: str | None, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = Planner(to_plan(precision="auto"), card=card)
    assert planner.settle(planner.base).train.precision == precision
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: precision == "mixed")
    assert machine.choose_precision("auto", torch.device("cuda"))[0] == precision
    chosen, remark = machine.choose_precision("mixed", torch.device("cuda"))
    assert chosen == "mixed" and bool(remark) == (precision == "float32")
    assert Planner(to_plan(precision="auto"), device="cpu", card=card).settle(planner.base).train.precision == "float32"


# ---------------------------------------------------------------------------------------------- before and after a run


def settled_for(config: RunConfig, mode: Any) -> settled.Settled:
    return settle(replace(config, train=replace(config.train, memory=mode)), torch.device("cpu"), most=True)


def test_planners_of_one_settled_run_do_not_disturb_each_other() -> None:
    planned = settled_for(to_plan(batch=4), "refuse")
    total = Planner.of(planned, 0).plan(planned.config).total
    other = Planner.of(planned, 0).plan(replace(planned.config, model=ModelConfig("llama-1m", checkpointing=True)))
    assert other.total < total == Planner.of(planned, 0).plan(planned.config).total


def test_preflight_refuses_warns_and_keeps_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    config = to_plan()
    need = foamlab.plan(config, device="cpu").total
    for capacity, mode, said in (
        (10 * need, "refuse", ""),
        (need, "refuse", "this run needs"),
        (need // 2, "ignore", ""),
    ):
        monkeypatch.setattr(advise, "available", lambda device, n=capacity: n)
        message = advise.preflight(settled_for(config, mode))
        assert message.startswith(said) and bool(message) == bool(said)
    monkeypatch.setattr(advise, "available", lambda device: int(0.8 * need))
    with pytest.raises(UserError, match=r"fits with --.*memory warn"):
        advise.preflight(settled_for(config, "refuse"))
    assert advise.preflight(settled_for(config, "warn"))


def test_running_out_of_memory_is_told_apart_and_answered() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert machine.out_of_memory(caught.value) and machine.out_of_memory(MemoryError())
    assert machine.out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not machine.out_of_memory(RuntimeError("shapes differ"))
    said = advise.after(settled_for(to_plan(), "refuse"))
    assert said.startswith("out of memory: this run needs about") and "--" in said


# ---------------------------------------------------------------------------------------------- input and output


def test_models_of_other_kinds() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    configuration = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, vocab_size=100
    )
    module = LlamaForCausalLM(configuration)
    module.model.embed_tokens.weight.requires_grad_(False)
    by_configuration = foamlab.plan(configuration, precision="float32", sequence=32)
    by_module = foamlab.plan(module, precision="float32", sequence=32)
    assert by_configuration.exact["weights"] == by_module.exact["weights"] == sum(p.nbytes for p in module.parameters())
    assert by_module.exact["gradients"] == by_module.exact["weights"] - 3200 * 4
    assert all(p.device.type == "cpu" and p.grad is None for p in module.parameters())
    with pytest.raises(UserError, match="cannot simulate"):
        foamlab.plan(nn.Linear(3, 3), "adamw")


@pytest.mark.parametrize(
    "text, size",
    [("24GB", 24 * GB), ("24 GiB", 24 * 2**30), ("24000MB", 24 * GB), ("1.5gb", 1500 * 10**6), ("RTX 4090", 24 * 2**30),
     ("NVIDIA A100-80GB", 80 * 2**30), ("h100", 80 * 2**30)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert memory(text) == size


@pytest.mark.parametrize(
    "text, said",
    [
        ("24QB", "unknown unit"),
        ("rtx-4091", "rtx-4090"),
        ("24", "24GB"),
        ("4090", "did you mean rtx-4090.* 4090GB"),
        ("4060", "did you mean rtx-4060 or rtx-4060-ti-16gb"),
        ("-3GB", "24GB"),
        ("0GB", "24GB"),
        ("9" * 400, "24GB"),
    ],
)
def test_nonsense_sizes(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        memory(text)


@pytest.mark.parametrize(
    "call, said",
    [(lambda: foamlab.plan("lama-7b"), "did you mean llama-7b"), (lambda: foamlab.plan("llama-1m", "fom"), "foam"),
     (lambda: foamlab.plan("llama-1m", levl=3), "level"), (lambda: foamlab.plan("llama-1m", batch=0), "positive"),
     (lambda: foamlab.plan("llama-1m", gpus=3, batch=2), "multiple of the 3"),
     (lambda: foamlab.plan("llama-1m", device="tpu"), "cpu or cuda"),
     (lambda: foamlab.plan("llama-1m", precision="fp8"), "unknown precision")],
)  # fmt: skip
def test_bad_input(call: Callable[..., Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        call()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"plan.{kind}" for kind in ("html", "json", "yaml", "png")]
    args = ["plan", "llama-1m", "--gpu", "1GB", "--data.sequence", "64", "--write", ",".join(map(str, files))]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "vocabulary 4,096" in out and "of 1.0 GB: fits" in out and "adamw" in out
    assert all(f.stat().st_size > 1000 for f in files[:2] + files[3:])
    page = files[0].read_text()
    assert "default-src 'none'" in page and "https://" not in page.split("<script>")[0]
    told = json.loads(files[1].read_text())
    assert told["asked"]["exact"]["weights"] == 7361024
    assert told["mildest"] == told["smallest_change"] and told["smallest_change"]["total"] == told["asked"]["total"]
    assert main(["train", str(files[2]), "--dry_run"]) == 0
    capsys.readouterr()
    assert "tokenizer: bpe:4096" in files[2].read_text()


def test_the_command_without_a_card_and_with_an_impossible_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advise, "rivals", lambda planner, asked, everything: [])
    assert main(["plan", "llama-1m", "--data.sequence", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["asked"]["device"] == "cpu"
    assert main(["plan", "llama-7b", "--chart", "--json"]) == 0
    assert 40.3e9 < json.loads(capsys.readouterr().out)["Adam"] < 40.5e9
    assert main(["plan", "llama-7b", "--gpu", "10GB"]) == 2
    assert "nothing fits 10GB" in capsys.readouterr().err
    assert main(["plan", "llama-1m", "--gpu", "1GB", "--write", "x.doc"]) == 2


def test_check_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = check(to_plan())
    text = plan_check.text(found)
    assert text.count("exact") == 3 and "%" in text.splitlines()[4]


def test_a_name_that_looks_like_markup_is_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small.prepare(tmp_path)
    (tmp_path / "a[").mkdir()
    (tmp_path / "llama").rename(model := tmp_path / "a[" / "b]")
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 512}))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model.name", "a[/b]", "--data.tokenizer", "bytes", "--data.sequence", "16"]) == 0
    assert "a[/b]: 7,488 parameters" in capsys.readouterr().out
