from __future__ import annotations

from pathlib import Path

import pytest

from bert_ds.cli.recipe_yaml import read_recipe
from bert_ds.cli.settings import Settings
from bert_ds.errors import ConfigError


def read(folder: Path, text: str) -> Settings:
    path = folder / "own.yaml"
    path.write_text(text)
    settings = Settings()
    read_recipe(path, settings)
    return settings


def test_values_arrive_in_the_type_of_their_field(tmp_path: Path) -> None:
    given = read(tmp_path, """
        model: {num_layers: 2, layernorm_epsilon: 1e-12, binary_head: false}
        data: {data_path: [0.3, a, 0.7, b], mask_prob: 1e-1}
        schedule: {train_iters: 1e3, lr_decay_iters: null, lr_warmup_fraction: .01}
        output: {save: checkpoints/x}
        """)
    values = {setting: value.value for setting, value in given.values.items()}
    assert not given.problems
    assert values == {
        "model.num_layers": 2, "model.layernorm_epsilon": 1e-12, "model.binary_head": False,
        "data.data_path": ("0.3", "a", "0.7", "b"), "data.mask_prob": 0.1, "schedule.train_iters": 1000,
        "schedule.lr_decay_iters": None, "schedule.lr_warmup_fraction": 0.01, "output.save": "checkpoints/x"}
    assert type(values["schedule.train_iters"]) is int
    assert given.values["output.save"].origin.endswith("own.yaml")


@pytest.mark.parametrize(("text", "expected"), [
    ("modl: {num_layers: 2}", "own.yaml: section=modl: is not known. Fix: did you mean model."),
    ("model: {num_layer: 2}", "model.num_layer=2: is not a known setting. Fix: did you mean num_layers."),
    ("model: {num_layers: many}", "model.num_layers=many: is not a whole number. Fix: correct it."),
    ("model: {num_layers: 2.5}", "model.num_layers=2.5: is not a whole number"),
    ("model: {num_layers: true}", "model.num_layers=True: is not a whole number"),
    ("model: {binary_head: 1}", "binary_head=1: is not true or false. Fix: correct it, or leave it out for true."),
    ("model: {norm_placement: middle}", "is not one of pre, post. Fix: correct it, or leave it out for pre."),
    ("model: {norm_placement: posts}", "is not one of pre, post. Fix: did you mean post."),
    ("output: {save_interval: often}", "is not a whole number. Fix: correct it, or leave it out."),
    ("data: {mask_prob: .nan}", "data.mask_prob=nan: is not a number"),
    ("data: {vocab_file: 7}", "data.vocab_file=7: is not text"),
    ("data: {data_path: {a: b}}", "is not one or several texts"),
    ("output: {save: [a]}", "is not text"),
    ("model: 3", "own.yaml: model=3: is not a section with settings"),
    ("engine: {lr: 1}", "section=engine: is not known"),
])
def test_wrong_values_name_file_key_and_repair(tmp_path: Path, text: str, expected: str) -> None:
    settings = read(tmp_path, text)
    assert not settings.values
    assert len(settings.problems) == 1 and expected in str(settings.problems[0])


@pytest.mark.parametrize(("text", "expected"), [
    ("model: {num_layers: 2", "while parsing a flow mapping"),
    ("model: {num_layers: 2, num_layers: 3}", "key num_layers is written twice"),
    ("model: {}\nmodel: {}", "key model is written twice"),
    ("", "holds no sections"),
    ("- 1", "holds no sections"),
])
def test_files_that_are_no_recipe(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read(tmp_path, text)
