"""The job file: what is accepted, what is refused, and what each refusal says."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from zerotrain.config import Config, ConfigError, differences, json_schema, load_config
from zerotrain.config.foreign import FOREIGN
from zerotrain.config.reference import with_tables
from zerotrain.config.validate import default_of, describe, keys_of, known_paths, section_of

CONFIGS = Path(__file__).parent.parent / "configs"
JOBS = sorted(CONFIGS.glob("*.json"))
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def nested(path: str, value: Any) -> dict[str, Any]:
    """A job that holds ``value`` at ``path`` and nothing else."""
    section, _, name = path.rpartition(".")
    return {section: {name: value}} if section else {name: value}


def problems(job: Any) -> tuple[str, ...]:
    """What loading ``job`` complains of."""
    with pytest.raises(ConfigError) as caught:
        load_config(job)
    return caught.value.problems


# Each row: path, the faulty value, and the whole text after the path (or its beginning, where it ends in "...").
FAULTY_VALUES = [
    ("zero_optimization.stage", 4, "4 is not a stage (0, 1, 2 or 3)"),
    ("zero_optimization.stage", -1, "-1 is not a stage (0, 1, 2 or 3)"),
    ("zero_optimization.stage", 1.5, "1.5 is not a stage (0, 1, 2 or 3)"),
    ("zero_optimization.stage", True, "true is not a stage (0, 1, 2 or 3)"),
    ("zero_optimization.stage", "2", '"2" is not a stage (0, 1, 2 or 3)'),
    ("zero_optimization", True, "true is not an object ({...})..."),
    ("zero_optimization.reduce_bucket_size", 0, "0 is too small (at least 1); left out, it is 500000000"),
    ("zero_optimization.reduce_bucket_size", 0.5, "0.5 is not a whole number (like 8 or 5e8)"),
    ("zero_optimization.shard_group_size", 0, "0 is too small (at least 1); left out, it is null"),
    ("zero_optimization.units", "blocks.*", '"blocks.*" is not a list of strings; left out, it is []'),
    ("zero_optimization.overlap_comm", 1, "1 is not true or false; left out, it is true"),
    ("zero_optimization.overlap_comm", "true", '"true" is not true or false; left out, it is true'),
    ("train_batch_size", 0, "0 is too small (at least 1); left out, it is null"),
    ("train_batch_size", "8", '"8" is not a whole number (like 8 or 5e8); write it without quotes'),
    ("train_batch_size", True, "true is not a whole number (like 8 or 5e8)"),
    ("gradient_accumulation_steps", -1, "-1 is too small (at least 1); left out, it is null"),
    ("gradient_clipping", -0.1, "-0.1 is too small (at least 0.0); left out, it is 0.0"),
    ("gradient_clipping", "1.0", '"1.0" is not a number; write it without quotes; left out, it is 0.0'),
    ("gradient_clipping", None, "null is not a number; left out, it is 0.0"),
    ("gradient_clipping_norm_type", 0, "0 is not the order of a norm (a number above 0, or ..."),
    ("gradient_clipping_norm_type", "max", '"max" is not the order of a norm (a number above 0, or ...'),
    ("bf16.enabled", "yes", '"yes" is not true or false; left out, it is false'),
    ("fp16.loss_scale", -1, "-1 is too small (at least 0.0); left out, it is 0.0"),
    ("fp16.initial_scale_power", 128, "128 is too large (at most 127); left out, it is 16"),
    ("fp16.hysteresis", 0, "0 is too small (at least 1); left out, it is 2"),
    ("fp16.min_loss_scale", 0, "0 is too small (more than 0.0); left out, it is 1.0"),
    ("communication_data_type", "fp8", "\"fp8\" is not one of 'fp32', 'bf16' or 'fp16'; left out, it is null"),
    ("communication_data_type", "fp-16", "\"fp-16\" is not one of 'fp32', 'bf16' or 'fp16'; did you mean \"fp16\"?..."),
    ("steps_per_print", 0, "0 is too small (at least 1); left out, it is 10"),
    ("seed", -1, "-1 is too small (at least 0); left out, it is null"),
    ("seed", 2**63, "9223372036854775808 is too large (less than 9223372036854775808); left out, it is null"),
    ("mismatch_timeout", 0, "0 is too small (more than 0.0); left out, it is 5.0"),
    ("optimizer", "AdamW", '"AdamW" is not an object ({...}); left out, it is null'),
    ("scheduler.type", 3, "3 is not a string"),
    # Unknown keys: a near one here, the same word elsewhere, nothing like it.
    ("zero_optimization.stag", 1, "unknown key; did you mean zero_optimization.stage?"),
    ("zero_optimization.Stage", 1, "unknown key; did you mean zero_optimization.stage?"),
    ("zero_optimisation", {"stage": 1}, "unknown key; did you mean zero_optimization?"),
    ("stage", 1, "unknown key here; did you mean zero_optimization.stage?"),
    ("loss_scale", 1, "unknown key here; did you mean fp16.loss_scale?"),
    ("bf16.fp32_parameter", [], "unknown key; did you mean bf16.fp32_parameters?"),
    ("zero_optimization.overlap_com", True, "unknown key; did you mean zero_optimization.overlap_comm?"),
    ("zero_optimization.reduce_scater", True, "unknown key; did you mean zero_optimization.reduce_scatter?"),
    ("fp16.qqq", 1, "unknown key; zerotrain.json_schema() lists the keys there are"),
    ("ignored_keys", ["a"], "unknown key; ..."),
    # What JSON cannot hold, from a mapping.
    ("gradient_clipping", math.nan, "nan is not a JSON number; write a finite one"),
    ("gradient_clipping", math.inf, "inf is not a JSON number; write a finite one"),
    ("bf16.fp32_parameters", {"a"}, "{'a'} (a Python set) is no JSON value; ..."),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "text"), FAULTY_VALUES)
def test_a_faulty_value_is_refused_by_path_with_what_was_found_and_expected(path: str, value: Any, text: str) -> None:
    found = next(line for line in problems(nested(path, value)) if line.startswith(f"{path}: "))
    said = found.removeprefix(f"{path}: ")
    assert said.startswith(text[:-3]) if text.endswith("...") else said == text
    assert "\n" not in found


def test_one_problem_reads_as_one_line() -> None:
    assert issubclass(ConfigError, ValueError)
    with pytest.raises(ConfigError) as caught:
        load_config({"zero_optimization": {"stage": 4}})
    assert str(caught.value) == "zero_optimization.stage: 4 is not a stage (0, 1, 2 or 3)"


CONTRADICTIONS = [
    ({"optimizer": {"params": {}}}, "optimizer.type: missing, and it has no default. Name of the optimizer"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.enabled: true, while fp16.enabled is true as well"),
    (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
        "train_batch_size: 32 is not a multiple of train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 3 "
        "= 12, so no number of ranks fits; the nearest that fits is train_batch_size 24 or 36",
    ),
    (
        {"train_batch_size": 3, "gradient_accumulation_steps": 4},
        "train_batch_size: 3 is not a multiple of gradient_accumulation_steps 4, so no number of ranks fits; the "
        "nearest that fits is train_batch_size 4",
    ),
    ({"zero_optimization": {"shard_group_size": 2}}, "zero_optimization.shard_group_size: 2, while stage 0"),
    (
        {"fp16": {"enabled": True, "min_loss_scale": 16, "initial_scale_power": 3}},
        "fp16.min_loss_scale: 16 is above the scale to start from, 2^3 = 8 (initial_scale_power)",
    ),
    ({"optimizer": {"type": "Muon"}}, 'optimizer.type: "Muon" needs whole matrices'),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps: missing, and it has no default."),
    (
        {"optimizer": SGD, "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 1.0}}},
        "scheduler.params: OneCycleLR refuses",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("job", "text"), CONTRADICTIONS)
def test_a_contradiction_is_refused(job: dict[str, Any], text: str) -> None:
    (only,) = problems(job)
    assert only.startswith(text)


def test_every_problem_of_a_file_comes_in_one_error(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    job = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 5,
        "zero_optimization": {"stage": 7, "shard_group_size": 2, "offload_param": {"device": "cpu"}, "stagee": 1},
        "bf16": {"enabled": True, "fp32_parameters": [1]},
        "fp16": {"enabled": True},
        "optimizer": {"type": "Adan"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}},
        "seed": "auto",
    }
    path.write_text(json.dumps(job))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    paths = {problem.split(":")[0] for problem in caught.value.problems}
    assert paths == {
        "train_batch_size", "zero_optimization.stage", "zero_optimization.offload_param", "zero_optimization.stagee",
        "bf16.enabled", "bf16.fp32_parameters[0]", "optimizer.type", "scheduler.params.warmup_type", "seed",
    }  # fmt: skip
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path} has {len(paths)} problems:"
    assert [line.split(".")[0].strip() for line in lines[1:]] == [str(n) for n in range(1, len(paths) + 1)]


def test_a_faulty_value_is_not_reported_again_through_what_follows_from_it() -> None:
    # The stage falls back to 0 in checking, where shard_group_size would be a contradiction of its own.
    assert len(problems({"zero_optimization": {"stage": 4, "shard_group_size": 2}})) == 1
    assert len(problems({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2.5})) == 1
    assert len(problems({"optimizer": {"params": 3}})) == 2  # no type, and params of a wrong kind
    assert len(problems({"optimizer": {"type": 3, "params": 3}})) == 2
    assert len(problems({"zero_optimization": {"units": [1, 2], "overlap_comm": 3}})) == 3


FILES = [
    ('{\n  "seed": 1,\n  "zero_optimization": {"stage": }\n}', "line 3, column 34: not JSON", ":3:34"),
    ('{\n  // the seed\n  "seed": 1\n}', "JSON has no comments, remove them", ":2:3"),
    ("", "line 1, column 1: not JSON", ":1:1"),
    ("[1, 2]", "the file holds [1, 2], and a job is an object", ""),
    ('{"seed": 1, "seed": 2}', "seed: written more than once in the same object; keep one", ""),
    ('{"bf16": {"enabled": true, "enabled": true}}', "bf16.enabled: written more than once", ""),
    ('{"optimizer": {"type": "SGD", "params": {"lr": 1, "lr": 1}}}', "optimizer.params.lr: written more than once", ""),
    ('{"gradient_clipping": NaN}', "gradient_clipping: nan is not a JSON number", ""),
]


@pytest.mark.parametrize(("text", "said", "where"), FILES)
def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, text: str, said: str, where: str) -> None:
    path = tmp_path / "job.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    assert said in caught.value.problems[0]
    assert str(caught.value).startswith(f"{path}{where}: ")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero2.json").write_text("{}")
    assert f"did you mean {tmp_path / 'zero2.json'}?" in problems(tmp_path / "zero22.json")[0]
    (tmp_path / "latin.json").write_bytes(b'{"optimizer": "\xe9"}')
    assert "cannot be read as UTF-8" in problems(tmp_path / "latin.json")[0]
    assert "cannot be read" in problems(tmp_path)[0]
    assert "json.loads" in problems('{"seed": 1}')[0]
    assert "neither the path" in problems(3)[0]
    assert "the key 3 is no string" in problems({3: 4})[0]


@pytest.mark.parametrize("path", ["train_batch_size", "gradient_clipping", "bf16.enabled", "zero_optimization.stage"])
def test_auto_is_refused_with_what_to_write(path: str) -> None:
    (only,) = problems(nested(path, "auto"))
    assert only.startswith(f'{path}: "auto" is for a trainer that fills it in, and none does here; write the value, or')


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_auto_among_arguments_is_refused(section: str) -> None:
    kind, name = {"optimizer": ("AdamW", "lr"), "scheduler": ("WarmupLR", "warmup_max_lr")}[section]
    (only,) = problems({section: {"type": kind, "params": {name: "auto"}}})
    assert only.startswith(f'{section}.params.{name}: "auto" is for a trainer')


@pytest.mark.parametrize("path", [path for path, foreign in FOREIGN.items() if not foreign.asks_for])
def test_keys_that_tune_deepspeed_have_no_effect_and_are_named(path: str) -> None:
    job = nested(path, 1e6)
    if "optimizer" in job:
        job["optimizer"].update(SGD)
    assert load_config(job).ignored_keys == (path,)


@pytest.mark.parametrize("path", [path for path, foreign in FOREIGN.items() if foreign.asks_for])
def test_keys_that_would_change_a_run_are_refused_unless_switched_off(path: str) -> None:
    foreign = FOREIGN[path]
    for off in (
        None,
        {"enabled": False, "x": 3},
        {"device": "none", "pin_memory": True},
        {"a": False},
        *foreign.neutral,
    ):
        assert load_config(nested(path, off)).ignored_keys == (path,)
    for on in ({"enabled": True}, {"device": "cpu"}, {"a": 2}, 7):
        (only,) = problems(nested(path, on))
        assert only.startswith(f"{path}: {json.dumps(on)} asks for {foreign.asks_for}, which zerotrain does not have; ")


def test_false_is_off_except_where_it_asks_for_something() -> None:
    assert load_config({"prescale_gradients": False, "gradient_predivide_factor": 1.0}).ignored_keys == (
        "prescale_gradients",
        "gradient_predivide_factor",
    )
    assert problems({"prescale_gradients": True})
    assert problems({"gradient_predivide_factor": 2.0})


def test_a_real_deepspeed_file_loads_and_names_what_has_no_effect() -> None:
    config = load_config(CONFIGS / "from-deepspeed.json")
    assert config.ignored_keys == (
        "wall_clock_breakdown",
        "zero_optimization.allgather_partitions",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.reduce_scatter",
        "zero_optimization.contiguous_gradients",
    )
    assert config.zero_optimization.reduce_bucket_size == 200_000_000


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_3_keys_have_no_effect_below_it(stage: int) -> None:
    keys = {"reshard_after_forward": False, "stage3_prefetch_bucket_size": 0}
    ignored = load_config({"zero_optimization": {"stage": stage, **keys}}).ignored_keys
    assert ignored == (() if stage == 3 else tuple(f"zero_optimization.{key}" for key in keys))


def test_harmless_optimizer_and_scheduler_arguments_are_named() -> None:
    config = load_config(
        {
            "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-3}},
            "scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1}},
        }
    )
    assert config.ignored_keys == ("optimizer.params.torch_adam", "scheduler.params.last_batch_iteration")


def test_values_are_taken_as_deepspeed_files_write_them() -> None:
    zero = load_config(
        {"zero_optimization": {"reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 1e7, "stage": 3}}
    )
    assert type(zero.zero_optimization.reduce_bucket_size) is int
    assert zero.zero_optimization.reduce_bucket_size == 500_000_000
    assert load_config({"gradient_clipping": 1}).gradient_clipping == 1.0
    assert load_config({"gradient_clipping_norm_type": "inf"}).gradient_clipping_norm_type == math.inf
    assert load_config({"gradient_clipping_norm_type": math.inf}).gradient_clipping_norm_type == math.inf
    assert load_config({"$schema": "schema.json"}) == load_config({})
    assert load_config({}).ignored_keys == ()
    assert load_config({"bf16": {"fp32_parameters": ["*norm*"]}}).bf16.fp32_parameters == ("*norm*",)


def test_a_config_is_frozen_and_free_of_its_source() -> None:
    source = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "seed": 3}
    config = load_config(source)
    source["optimizer"]["params"]["lr"] = 5.0  # type: ignore[index]
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 0.1}
    with pytest.raises(ValidationError):
        config.seed = 4
    with pytest.raises(ValidationError):
        config.bf16.enabled = True
    assert load_config(config) is config


def test_a_config_survives_pickle_and_its_own_dump() -> None:
    config = load_config({"gradient_clipping_norm_type": "inf", "dump_state": True, "optimizer": SGD})
    assert pickle.loads(pickle.dumps(config)).ignored_keys == copy.deepcopy(config).ignored_keys == ("dump_state",)
    again = load_config(json.loads(json.dumps(config.dump())))
    assert again.dump() == config.dump()
    assert again.fingerprint() == config.fingerprint()


def test_an_error_survives_pickle() -> None:
    error = ConfigError(["a: 1", "b: 2"], "job.json")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "job.json has 2 problems:\n  1. a: 1\n  2. b: 2"


FINGERPRINTS = [
    ({"seed": 1}, {"seed": 2}, ["seed: 1 != 2"]),
    ({"zero_optimization": {"stage": 2}}, {}, ["zero_optimization.stage: 2 != 0"]),
    ({"optimizer": SGD}, {}, ['optimizer: {"type": "SGD", "params": {"lr": 0.1}} != null']),
    (
        {"optimizer": SGD},
        {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}},
        ["optimizer.params.lr: 0.1 != absent", "optimizer.params.momentum: absent != 0.9"],
    ),
    ({"bf16": {"fp32_parameters": ["a"]}}, {}, ['bf16.fp32_parameters: ["a"] != []']),
    ({"steps_per_print": 1}, {"steps_per_print": None, "dump_state": True, "mismatch_timeout": 9}, []),
    ({"optimizer": {"type": "SGD", "params": {"lr": 1}}}, {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}, []),
]


@pytest.mark.parametrize(("left", "right", "lines"), FINGERPRINTS)
def test_fingerprints_agree_exactly_where_nothing_differs(left: Any, right: Any, lines: list[str]) -> None:
    a, b = load_config(left), load_config(right)
    assert differences(a, b) == differences(a.meaning(), b.meaning()) == lines
    assert (a.fingerprint() == b.fingerprint()) == (not lines)


def test_differences_tell_true_from_1() -> None:
    assert differences({"a": True}, {"a": 1}) == ["a: true != 1"]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_every_job_of_the_repository_loads(path: Path) -> None:
    config = load_config(path)
    assert path.name == "from-deepspeed.json" or config.ignored_keys == ()
    assert config.batch(2).micro == 8
    assert config.scheduler is not None
    assert config.scheduler.params["total_num_steps"] == 300
    assert f"| `{path.name}` |" in (CONFIGS / "README.md").read_text(encoding="utf-8")


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """``model`` and every model below it."""
    yield model
    for info in model.model_fields.values():
        below = section_of(info)
        if below is not None:
            yield from models(below)


def test_the_readme_has_every_key_with_its_default_and_meaning() -> None:
    text = (CONFIGS / "README.md").read_text(encoding="utf-8")
    assert with_tables(text) == text, "run: python -m zerotrain.config configs/README.md"
    for model in models(Config):
        for name, info in keys_of(model).items():
            assert f"| `{name}` |" in text
            assert describe(info) in text
            if not info.is_required() and section_of(info) is None:
                assert f"| `{name}` | `{default_of(info)}` |" in text
    assert all(f"`{path}`" in text for path in FOREIGN)
    with pytest.raises(ValueError, match="markers"):
        with_tables("no markers")


def test_every_key_is_explained() -> None:
    assert all(info.description for model in models(Config) for info in model.model_fields.values())


def test_the_json_schema_describes_every_key_and_closes_every_object() -> None:
    schema = json_schema()
    text = json.dumps(schema)
    assert '"ge"' not in text
    assert "\\n" not in text
    for path in (*known_paths(Config), *FOREIGN):
        section, _, name = path.rpartition(".")
        holder = schema
        if section:
            model = section_of(Config.model_fields[section])
            assert model is not None
            holder = schema["$defs"][model.__name__]
        assert holder["properties"][name]["description"], path
        assert holder["additionalProperties"] is False
    assert schema["$defs"]["ZeroConfig"]["properties"]["stage"]["enum"] == [0, 1, 2, 3]
    assert schema["properties"]["train_batch_size"]["anyOf"][0] == {"minimum": 1, "type": "integer"}
    assert schema["properties"]["$schema"]
    assert "ignored_keys" not in schema["properties"]
