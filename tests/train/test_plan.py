"""Steps compiled for devices that are not here: what they take, and what does not fit."""

import dataclasses

import jax
import pytest

import configs
from tape_jax import positions
from tests.target import device
from tests.tiny import random_params, tiny
from train import methods, targets
from train.model_folder import write_model
from train.plan import _of_command, largest_arrays, make_plan
from train.step import count_parameters, init_params, split

BASE = tiny(position="rope")

HLO = """HloModule jit_step

%fused_computation (p: f32[8,1024]) -> f32[8,1024] {
  %inside = f32[8,1024]{1,0} exponential(%p)
}

ENTRY %main (a: f32[4,2]) -> f32[4,2] {
  %a = f32[400,200]{1,0} parameter(0)
  %product = bf16[64,32]{1,0} dot(%a, %a), metadata={op_name="jit(step)/jvp(M)/up/dot_general"}
  %again = bf16[64,32]{1,0} dot(%a, %a), metadata={op_name="jit(step)/other"}
  ROOT %sum = f32[4,2]{1,0} add(%a, %a)
}
"""


def test_arrays_of_a_program():
    """Those in memory: no parameters, nothing within a fusion, one of each shape."""
    found = largest_arrays(HLO, 5)
    assert found[0] == (64 * 32 * 2, "bf16[64, 32]", "jit(step)/jvp(M)/up/dot_general")
    assert [shape for _, shape, _ in found] == ["bf16[64, 32]", "f32[4, 2]"]


def small(name, **fields):
    base = tiny(
        position="rope", hidden_size=256, num_heads=4, num_kv_heads=2, vocab_size=128, **fields
    )
    method = methods.get(name)
    llama = configs.get("llama2-7b-8k")
    task = dataclasses.replace(llama.task, sequence_length=256, vocab_size=128, eval_lengths=())
    model = dataclasses.replace(method.adapt(base), dtype="bfloat16")
    return dataclasses.replace(llama, model=model, method=method, task=task, batch_size=16)


@pytest.mark.aot
def test_a_plan_counts_what_is_on_one_device():
    device("h200")
    config = dataclasses.replace(small("tape"), accumulation=2)
    plan = make_plan(config, "h200", 4)
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    cut = [x for x in jax.tree.leaves(shapes) if x.ndim > 2]
    assert plan.weights >= count_parameters(cut)  # float32, over 4 devices
    trained = count_parameters(split(config, shapes)[0])
    assert 2 * trained <= plan.optimizer <= 8 * trained + 64
    assert plan.arguments >= plan.weights + plan.optimizer
    assert plan.fits and plan.peak < plan.memory


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "count", "accumulation"), [("h200", 8, 8), ("v5p", 16, 4), ("v5p", 32, 2)]
)
def test_llama_2_7b_fits(target, count, accumulation):
    """The paper's run, whole: well below what a device has."""
    device(target)
    config = dataclasses.replace(configs.get("llama2-7b-8k"), accumulation=accumulation)
    plan = make_plan(config, target, count)
    frozen = 6_738_415_616 * 4 / count
    assert 0.99 * frozen < plan.weights < 1.05 * frozen + 2**27
    assert plan.peak < 20 * 2**30 < plan.memory
    assert plan.optimizer < 17_072_128 * 2 * 4 + 64


@pytest.mark.parametrize(
    ("change", "count", "message"),
    [
        ({"batch_size": 15}, 8, "batch_size=15"),
        ({}, 3, "mesh"),
        ({"accumulation": 16}, 16, "mesh.data \\* mesh.fsdp"),
    ],
)
def test_plans_that_cannot_be(change, count, message):
    config = dataclasses.replace(small("lora"), **change)
    with pytest.raises(ValueError, match=message):
        make_plan(config, "h200", count)


def test_another_method_needs_a_base(tmp_path):
    """Its model, which the named config does not have, is what has to be planned."""
    named = configs.get("llama2-7b-8k")
    assert _of_command(named, named.name, None) == named
    lora = dataclasses.replace(named, method=methods.get("lora"))
    with pytest.raises(ValueError, match="name it with --init"):
        _of_command(lora, named.name, None)
    write_model(tmp_path / "base", BASE, random_params(BASE), source="test")
    found = _of_command(lora, named.name, tmp_path / "base")
    assert found.model.lora is not None and found.model.hidden_size == BASE.hidden_size
    assert found.model.position == positions.RoPE(scaling=positions.LinearScaling(2.0))


def test_topologies_that_are_not_described():
    with pytest.raises(ValueError, match="up to 64"):
        targets.TARGETS["v5p"].topology(65)
