"""docs/house.md is true: its rooms are the files, imports point one way, and each package keeps to its own."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PAGE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
PACKAGES = ("torchfoam", "foamlab")
FOLDERS = sorted(x.name for x in (SOURCE / "foamlab").iterdir() if (x / "__init__.py").exists())
READING = ("model", "search", "folder", "studies", "results", "charts", "page", "inventory")  # of a contest: no torch
HOUSES = PACKAGES + tuple(f"foamlab/{name}" for name in FOLDERS)  # all whose rooms have an order


@cache
def files(house: str) -> dict[str, list[tuple[str, ast.Module]]]:
    """room -> its (path, tree)s; a folder is one room, `__init__` and `__main__` are none."""
    rooms: dict[str, list[tuple[str, ast.Module]]] = {}
    for path in sorted((SOURCE / house).rglob("*.py")):
        inside = path.relative_to(SOURCE / house)
        if len(inside.parts) > 1 or not inside.stem.startswith("__"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            rooms.setdefault(inside.with_suffix("").parts[0], []).append((str(path.relative_to(SOURCE)), tree))
    return rooms


def imports(tree: ast.Module, top: bool = False) -> list[tuple[int, str, list[str]]]:
    """(dots, module, names) of each import; of those at module level alone if `top`; for type checkers, none."""
    found: list[tuple[int, str, list[str]]] = []
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found += [(0, alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", [alias.name for alias in node.names]))
        elif not (top and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))):
            todo += ast.iter_child_nodes(node)
    return found


def rooms_of(house: str, path: str, tree: ast.Module, top: bool = False) -> set[str]:
    """The rooms of `house` that a file in it imports; files of a folder may know each other."""
    here, found = path.removesuffix(".py").split("/"), set()
    for dots, module, names in imports(tree, top):
        base = here[: len(here) - dots] if dots else []
        for name in [module] if module else names:
            target = "/".join([*base, *name.split(".")])
            if target.startswith(house + "/"):
                found.add(target.removeprefix(house + "/").split("/")[0])
    return found


def layers(house: str) -> dict[str, int]:
    """room -> its place in the order that the page gives."""
    name = house.split("/")[-1]
    block = re.search(r"## Rooms.*?```\n(.*?)```", PAGE, re.S)
    assert block
    chain = re.search(rf"^{name} +(.*?)(?=^\w|\Z)", block[1], re.S | re.M)
    assert chain
    steps = [re.findall(r"[a-z_]+", step) for step in re.sub(r"\(.*?\)", "", chain[1]).split("->")]
    return {room: place for place, step in enumerate(steps) for room in step}


@pytest.mark.parametrize("house", HOUSES)
def test_the_page_lists_every_room(house: str) -> None:
    assert set(files(house)) == set(layers(house)), "list each room in docs/house.md, where its imports allow"


@pytest.mark.parametrize("house", HOUSES)
def test_imports_point_left_so_there_is_no_circle(house: str) -> None:
    order = layers(house)
    for room, parts in files(house).items():
        for path, tree in parts:
            others = rooms_of(house, path, tree) - {room}
            wrong = [other for other in others if order.get(other, 99) >= order.get(room, 99)]
            assert not wrong, f"{path} imports {wrong}, which docs/house.md places beside or after {room}"


def test_the_library_needs_torch_and_nothing_else() -> None:
    for parts in files("torchfoam").values():
        for path, tree in parts:
            outside = {m.split(".")[0] for dots, m, _ in imports(tree) if not dots} - sys.stdlib_module_names
            assert outside <= {"torch"} | ({"triton"} if "triton" in path else set()), f"{path} imports {outside}"


@pytest.mark.parametrize("package", ["torchfoam", "foamlab"])
def test_who_uses_it_sees_its_types(package: str) -> None:
    assert (SOURCE / package / "py.typed").is_file()  # without it mypy takes all of an installed package for Any


def test_the_lab_enters_the_library_by_its_door() -> None:
    for parts in files("foamlab").values():
        for path, tree in parts:
            for dots, module, names in imports(tree):
                if not dots and module.split(".")[0] == "torchfoam":
                    assert module == "torchfoam" and names, f"{path}: use `from torchfoam import ...`, not {module}"


@cache
def all_imports(top: bool) -> dict[str, set[str]]:
    """File of the lab -> what it imports by itself; at module level alone if `top`."""
    direct: dict[str, set[str]] = {}
    for path in (SOURCE / "foamlab").rglob("*.py"):
        file, tree = (
            path.relative_to(SOURCE).as_posix().removesuffix(".py"),
            ast.parse(path.read_text(encoding="utf-8")),
        )
        here, direct[file] = file.split("/"), set()
        for dots, module, names in imports(tree, top):
            base = here[: len(here) - dots] if dots else []
            for name in names or [""]:
                parts = [*base, *module.split("."), name] if module else [*base, name]
                # to import a.b.c is to import a and a.b first; a package by itself is its door, __init__
                for k in range(1 if parts[0] != "foamlab" else 2, len(parts) + 1):  # the lab's own door is lazy
                    direct[file] |= {"/".join(parts[:k]), "/".join([*parts[:k], "__init__"])}
    return direct


def reaches(target: str, top: bool) -> set[str]:
    """Files of the lab that import `target`, themselves or through others; at module level alone if `top`."""
    direct = all_imports(top)
    found = {file for file, names in direct.items() if target in names or (target == "torch" and "torchfoam" in names)}
    while more := {file for file, names in direct.items() if names & found} - found:
        found |= more
    return {file.removeprefix("foamlab/") for file in found}


def test_what_reads_run_folders_needs_no_torch() -> None:
    heavy = reaches("torch", top=False)
    assert not {file for file in heavy if file.startswith(("config", "files", "text", "runs/", "report/"))}
    assert not {f"contest/{room}" for room in READING} & heavy


def test_help_imports_nothing_heavy() -> None:
    light = {
        "__main__",
        "cli/__init__",
        "cli/main",
        "cli/command",
        "cli/arguments",
        "cli/contest_commands",
        *(f"cli/commands/{path.stem}" for path in (SOURCE / "foamlab" / "cli" / "commands").glob("*.py")),
        "signals",
        "settings",
        "config",
    }
    for heavy in ("torch", "transformers", "numpy", "plotly", "rich", "yaml"):
        assert not light & reaches(heavy, top=True), heavy


@pytest.mark.parametrize("package, allowed", [("torchfoam", {"shard"}), ("foamlab", {"machine", "training"})])
def test_torch_distributed_has_few_doors(package: str, allowed: set[str]) -> None:
    for room, parts in files(package).items():
        for path, tree in parts:
            used = any(m.startswith("torch.distributed") or "distributed" in names for _, m, names in imports(tree))
            assert not used or room in allowed, f"{path} imports torch.distributed"


@pytest.mark.parametrize("package", PACKAGES)
def test_only_the_command_prints(package: str) -> None:
    for room, parts in files(package).items():
        for path, tree in parts:
            calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "print"]
            assert not calls or (package, room) == ("foamlab", "cli"), f"{path} prints"


@pytest.mark.parametrize("folder", ["src", "tests"])
def test_files_stay_small(folder: str) -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    large = {str(path.relative_to(ROOT)): lines for path, lines in sizes.items() if lines > 400}
    assert sizes and not large, f"over 400 lines: {large}"


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_stay_small(package: str) -> None:
    for parts in files(package).values():
        for path, tree in parts:
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                    size = (node.end_lineno or 0) - first.lineno + 1
                    assert size <= 60, f"{path}: {node.name} has {size} lines"
