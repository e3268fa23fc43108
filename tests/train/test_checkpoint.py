"""Checkpoints move between device layouts, and a save that fails is heard of."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from tape_jax.sharding import MESH_AXES
from tests.train.small import small
from train.checkpoint import Checkpoints
from train.data.pipeline import batches
from train.step import TrainState, abstract_state, make_state, shardings_of

pytestmark = pytest.mark.multidevice


def mesh_of(*sizes):
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 4)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2, 1, 2), (1, 8, 1, 1)])
def test_saved_on_data_x_fsdp_restored_elsewhere(tmp_path, sizes):
    config = small()
    where = shardings_of(abstract_state(config, mesh_of(2, 4, 1, 1)))
    saved = jax.jit(lambda: make_state(config, 7), out_shardings=where)()
    saved = saved.__class__(saved.step + 3, saved.params, saved.opt_state)
    data = batches(config.task.source(0), 16)
    next(data)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, saved, data)
    checkpoints.close()

    mesh = mesh_of(*sizes)
    again = batches(config.task.source(0), 16)
    restored = Checkpoints(tmp_path).restore(abstract_state(config, mesh), again)
    for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert b.sharding.mesh == mesh
    np.testing.assert_array_equal(next(again)["tokens"], next(data)["tokens"])
    kernel = restored.params["layers"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 16 // sizes[1], 16 // sizes[3])


def test_nothing_to_restore(tmp_path):
    config = small()
    abstract = abstract_state(config, mesh_of(1, 1, 1, 1))
    assert Checkpoints(tmp_path).restore(abstract, batches(config.task.source(0), 16)) is None
    with pytest.raises(FileNotFoundError, match="lacks a checkpoint"):
        Checkpoints(tmp_path).read(abstract)


def test_old_checkpoints_go_and_the_newest_stay(tmp_path):
    config = small()
    state, data = make_state(config, 0), batches(config.task.source(0), 16)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, state, data)
    checkpoints.save(4, state, data)  # saved already: nothing happens
    checkpoints.close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["3", "4"]


def test_a_failed_save_is_raised_not_swallowed(tmp_path):
    config = small()
    state, data = make_state(config, 0), batches(config.task.source(0), 16)
    checkpoints = Checkpoints(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(Exception, match=r"(?i)checkpoints|not a directory|exists"):
        checkpoints.save(1, state, data)
        checkpoints.close()


def test_reading_steps_over_a_damaged_checkpoint_without_moving_it(tmp_path, caplog):
    config = small()
    state, data = make_state(config, 0), batches(config.task.source(0), 16)
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        moved = TrainState(jnp.asarray(step, jnp.int32), state.params, state.opt_state)
        checkpoints.save(step, moved, data)
    checkpoints.close()
    shutil.rmtree(tmp_path / "checkpoints/2/state/d")
    abstract = abstract_state(config, mesh_of(1, 1, 1, 1))
    assert int(Checkpoints(tmp_path).read(abstract).step) == 1
    assert "checkpoint 2 cannot be read" in caplog.text
    assert (tmp_path / "checkpoints/2").exists()
