"""Units: repeated blocks first, then owners, small neighbours merged; every parameter in exactly one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import Shape, TinyLM
from zerotrain.zero.discover import aliases, find_units


def names_of(model: nn.Module, **options: object) -> list[str]:
    return [spec.name for spec in find_units(model, **options)]  # type: ignore[arg-type]


def owned(model: nn.Module, **options: object) -> list[str]:
    return [name for spec in find_units(model, **options) for name, _ in spec.parameters]  # type: ignore[arg-type]


def test_blocks_embedding_and_head_are_units() -> None:
    found = names_of(TinyLM(Shape()))
    assert [name for name in found if name.startswith("blocks")] == ["blocks.0", "blocks.1", "blocks.2"]
    assert "embed" in found


@pytest.mark.parametrize("smallest", [0, 100, 10**9])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_one_unit(smallest: int, tied: bool) -> None:
    model = TinyLM(Shape(tied=tied))
    assert sorted(owned(model, min_elements=smallest)) == sorted(name for name, _ in model.named_parameters())


def test_small_neighbours_are_merged_up_to_the_bound() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    assert len(names_of(model, min_elements=0)) == 8
    assert len(names_of(model, min_elements=10**9)) == 1
    assert all(s.numel <= 50 for s in find_units(model, min_elements=10**9, max_elements=50))


def test_patterns_name_the_units() -> None:
    model = TinyLM(Shape())
    assert {"blocks.0", "blocks.2"} <= set(names_of(model, patterns=["blocks.0", "blocks.2"]))
    with pytest.raises(ValueError, match="matches no module"):
        find_units(model, ["layers.*"])
    with pytest.raises(ValueError, match="never called"):
        find_units(model, ["blocks"])


def test_a_large_block_with_blocks_inside_is_looked_into() -> None:
    def stage() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))

    assert len(names_of(nn.Sequential(stage(), stage()))) == 6


def test_tied_weights_have_one_unit_entered_from_both_places() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    model.head.weight = model.embed.weight
    [spec] = find_units(model)
    assert spec.tied
    assert spec.modules == [model.embed, model.head]
    assert aliases(model) == {"embed.weight": ("embed.weight", "head.weight")}


def test_parameters_of_lists_belong_to_the_module_that_calls_them() -> None:
    model = nn.Module()
    model.weights = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])
    [spec] = find_units(model)
    assert spec.modules == [model]
