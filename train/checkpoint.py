"""Orbax checkpoints of the state, the data iterator and the config; and the run's saved config."""

import json
import logging
from pathlib import Path

import grain
import jax
import orbax.checkpoint as ocp

from tape_jax.saved import read_object
from train.config import TrainConfig, differences, from_dict, to_dict
from train.step import TrainState

log = logging.getLogger("tape_jax")


class ConfigChangedError(ValueError):
    """The work directory holds a run of another config."""


def check_workdir(workdir: Path, config: TrainConfig, allow_change: bool) -> None:
    """Raises ValueError when this run cannot live there; nothing is written.

    Raises:
      ConfigChangedError: the run there has another config; lists the fields that differ.
      ValueError: what is there is a model and no run, or a file.
    """
    path = workdir / "config.json"
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"{workdir} is a file: name a folder as --workdir")
    found = read_object(path) if path.exists() else None
    if (workdir / "model.json").exists() or (found is not None and "task" not in found):
        raise ValueError(f"{workdir} holds a model and no run: name another --workdir")
    lines = [] if found is None else differences(to_dict(config), found)
    if lines and not allow_change:
        raise ConfigChangedError(
            f"{workdir} holds a run with another config:\n  "
            + "\n  ".join(lines)
            + "\nuse another --workdir, or --allow-config-change to continue it as asked"
        )


def keep_config(workdir: Path, config: TrainConfig) -> None:
    """Saves the config of the run; another one that is there is kept beside it."""
    path, ours = workdir / "config.json", to_dict(config)
    found = read_object(path) if path.exists() else None
    if found == ours:
        return
    if found is not None:
        log.warning("config changed: %s", "; ".join(differences(ours, found)))
        _keep_old(path)
    if jax.process_index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ours, indent=2) + "\n")


def load_config(workdir: Path) -> TrainConfig:
    """The config of the run in `workdir`.

    Raises:
      FileNotFoundError: there is none.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{workdir} holds no run: {path} is missing")
    return from_dict(TrainConfig, read_object(path))


class Checkpoints:
    """The checkpoints of one run: saved asynchronously, the damaged ones stepped over."""

    def __init__(self, workdir: Path, keep: int = 3):
        """Opens (and makes) `workdir`/checkpoints."""
        self._folder = workdir.absolute() / "checkpoints"
        self._keep = keep
        self._open()

    def _open(self):
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(self._keep),
            # In the background, a folder that cannot be made would be waited for in vain.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def save(self, step: int, state: TrainState, data: grain.DatasetIterator) -> None:
        """Starts saving; returns while the files are being written.

        Raises whatever an earlier save that went wrong in the background has to say.
        """
        if step in self._manager.all_steps():
            return
        # One state of the iterator for all processes, so that another number of them can go on.
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data.get_state())
        )
        self._manager.save(step, args=items, force=True)

    def restore(self, abstract: TrainState, data: grain.DatasetIterator) -> TrainState | None:
        """The newest state that can be read, onto the abstract one's shardings; None without any.

        Sets the data iterator to where it was. A checkpoint that cannot be read is moved to
        `checkpoints-damaged` (nothing is deleted) and the one before it is tried.

        Raises:
          ConfigChangedError: a checkpoint is sound, but of arrays with other shapes.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                found = self._read(step, abstract, {"data": ocp.args.JsonRestore()})
                data.set_state(found["data"])
                return found["state"]
            except ConfigChangedError:
                raise
            except Exception as error:
                self._set_aside(step, error)
        return None

    def read(self, abstract: TrainState, step: int | None = None) -> TrainState:
        """The state at `step`, or the newest that can be read, without the data iterator.

        Raises:
          FileNotFoundError: no such checkpoint, or none at all; lists the steps there are.
          ValueError: it is damaged, or of another model.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        if not steps or (step is not None and step not in steps):
            wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
            raise FileNotFoundError(f"{self._folder} lacks {wanted}; steps there: {steps}")
        for candidate in steps if step is None else [step]:
            try:
                return self._read(candidate, abstract, {})["state"]
            except Exception as error:
                if candidate == step or candidate == steps[-1]:
                    others = [other for other in steps if other != candidate]
                    raise ValueError(
                        f"checkpoint {candidate} in {self._folder} cannot be read"
                        f" ({_first_line(error)}); others: {others or 'none'}"
                    ) from error
                log.warning("checkpoint %d cannot be read (%s)", candidate, _first_line(error))
        raise AssertionError("unreachable")

    def _read(self, step, abstract, args):
        saved = ocp.StandardCheckpointHandler().metadata(self._folder / str(step) / "state")
        _check_shapes(step, saved.tree["params"], abstract.params)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), **args)
        return self._manager.restore(step, args=items)

    def _set_aside(self, step, error):
        damaged = self._folder.with_name("checkpoints-damaged")
        log.warning(
            "checkpoint %d is damaged (%s): moved to %s, trying the one before it",
            step,
            _first_line(error),
            damaged,
        )
        self._manager.close()
        if jax.process_index() == 0:
            damaged.mkdir(exist_ok=True)
            (self._folder / str(step)).rename(_unused(damaged / str(step)))
        self._open()

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def _check_shapes(step, saved, wanted):
    saved, wanted = ocp.tree.to_flat_dict(saved), ocp.tree.to_flat_dict(wanted)
    lines = []
    for path in sorted(saved.keys() | wanted.keys()):
        have, want = (tuple(t[path].shape) if path in t else "nothing" for t in (saved, wanted))
        if have != want:
            lines.append(f"{'/'.join(map(str, path))}: {have} is saved, {want} is needed")
    if lines:
        more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
        raise ConfigChangedError(
            f"checkpoint {step} holds another model:\n  " + "\n  ".join(lines[:8]) + more
        )


def _first_line(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def _keep_old(path: Path):
    if jax.process_index() == 0:
        path.rename(_unused(path.with_suffix(".old" + path.suffix)))


def _unused(path: Path) -> Path:
    """This path, or the first of its numbered siblings that does not exist."""
    candidate, n = path, 1
    while candidate.exists():
        candidate, n = path.with_name(f"{path.stem}-{n}{path.suffix}"), n + 1
    return candidate
