"""Where recipes and DeepSpeed configurations lie: beside the checkout, or inside the installed package."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
RECIPES = "recipes"
DS_CONFIGS = "ds_configs"


def shipped_roots() -> tuple[Path, ...]:
    """Folders that hold `recipes/` and `ds_configs/`, the checkout before the package's own copy."""
    candidates = (PACKAGE.parent, PACKAGE / "_shipped")
    return tuple(root for root in candidates if (root / RECIPES).is_dir() and (root / DS_CONFIGS).is_dir())


def shipped_names() -> tuple[str, ...]:
    """Names of the recipes that come with the package."""
    return tuple(sorted({path.stem for root in shipped_roots() for path in (root / RECIPES).glob("*.yaml")}))


def find_file(written: str) -> Path | None:
    """The file a user means by `written`: in the working directory, else among the shipped files."""
    candidates = (Path(written).expanduser(), *(root / written for root in shipped_roots()))
    return next((path for path in candidates if path.is_file()), None)


def find_recipe(name_or_file: str) -> Path | None:
    """A recipe by its name (`340m`) or by its file."""
    return find_file(name_or_file) or find_file(f"{RECIPES}/{name_or_file}.yaml")


def recipe_beside(config: Path) -> Path | None:
    """The recipe that has the name of this DeepSpeed configuration: beside it, in `recipes/` beside its folder, or
    shipped."""
    near = (config.with_suffix(".yaml"), config.parent.parent / RECIPES / f"{config.stem}.yaml")
    return next((path for path in near if path.is_file()), None) or find_file(f"{RECIPES}/{config.stem}.yaml")


def config_beside(recipe: Path) -> Path | None:
    """The DeepSpeed configuration that has the name of this recipe, found likewise."""
    near = (recipe.with_suffix(".json"), recipe.parent.parent / DS_CONFIGS / f"{recipe.stem}.json")
    return next((path for path in near if path.is_file()), None) or find_file(f"{DS_CONFIGS}/{recipe.stem}.json")


def display(path: Path) -> str:
    """The path as short as it is unmistakable: relative below the working directory."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
