"""The engine: what a training script holds. It reads like the description of one training step."""

from __future__ import annotations

import atexit
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from zerotrain.checkpoint.keeper import Keeper, Progress
from zerotrain.checkpoint.loader import Loaded, Options, load_newest
from zerotrain.closing import agree, reason_to_skip
from zerotrain.comm import Traffic
from zerotrain.config import Config
from zerotrain.errors import ZerotrainError
from zerotrain.job import Job, Request, set_up
from zerotrain.steplog import StepLog
from zerotrain.window import Window, loss_of, scaled_gradient
from zerotrain.zero import report
from zerotrain.zero.access import Access
from zerotrain.zero.hooks import Hook, map_tensors
from zerotrain.zero.loss_scale import LossScale
from zerotrain.zero.schedule import Sync
from zerotrain.zero.thaw import thaw
from zerotrain.zero.unit import Unit

__all__ = ["Engine", "initialize"]

logger = logging.getLogger("zerotrain")
_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_open_engines() -> None:
    """A rank that ends takes its connections along: what it still owes to the others is sent first."""
    for engine in list(_open_engines):
        engine.close()


def initialize(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any,
) -> tuple[Engine, torch.optim.Optimizer | None, Any, Any]:
    """Shard `model` over the ranks of the job and return `(engine, optimizer, loader, scheduler)`.

    Args:
        model: any module, on one device. Its parameters stay the same objects; every rank ends with rank 0's values.
        optimizer: an element-wise torch optimizer over the model's parameters, a callable that makes one from
            `model_parameters`, or None: from the config's `optimizer` section (without one, the engine only evaluates).
        model_parameters: parameters or param groups for an optimizer that is made here; default: all.
        training_data: a Dataset, any iterable of samples, or a DataLoader; None: no loader is returned.
        lr_scheduler: a scheduler on the optimizer, a callable from the optimizer, or None: from the config. It is stepped
            by `engine.step()` (but `ReduceLROnPlateau`, which is yours to step).
        collate_fn: as of `torch.utils.data.DataLoader`.
        config: path of the JSON job file, or a dict of the same keys (see `configs/README.md`).

    Raises:
        ConfigError: every problem of the config, before any process group exists.
        ValueError: a model or an optimizer that cannot be sharded, with the reason.
        RankMismatchError: the ranks were given different models, configs or optimizers. On every rank.
        CheckpointError: the config says to resume, and there are checkpoints of which none can be loaded.
    """
    request = Request(model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn, config)
    job = set_up(request)
    engine = Engine(job)
    if job.config.checkpoint.resume is not None:
        try:
            engine.resume()
        except BaseException:
            engine.close()
            raise
    return engine, job.optimizer, job.loader, job.lr_scheduler


class Engine:
    """A model in sharded training. Made by `zerotrain.initialize`.

    A window is the micro batches between two optimizer steps. `module` is the user's model, with its own parameters.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.module: nn.Module = job.module
        self.config: Config = job.config
        self.optimizer = job.optimizer
        self.lr_scheduler = job.lr_scheduler
        self.device = job.device
        self.rank = job.mesh.rank
        self.world_size = job.mesh.world_size
        self.train_batch_size = job.batch.train
        self.train_micro_batch_size_per_gpu = job.batch.micro
        self.gradient_accumulation_steps = job.batch.accumulation
        self.global_steps = 0
        self.skipped_steps = 0
        self.micro_steps = 0
        self.samples = 0
        """Samples that optimizer steps have seen, over all ranks."""
        self.tokens = 0.0
        """Tokens that they have seen, as far as `backward` was told of them."""
        self.client_state: Any = None
        """What `save_checkpoint` was given, of the checkpoint that was loaded last."""
        self.metrics: dict[str, float] = {}
        self._model = job.model
        self._sharded_optimizer = job.sharded_optimizer
        self._loss_scale: LossScale = job.loss_scale
        self._norm: float | None = None
        self._norm_order = float(job.config.gradient_clipping_norm_type)
        self._syncing = True
        self.driven = False
        self._window = Window()
        self._log = StepLog(self.rank, job.config.steps_per_print)
        self._access = Access(job.model, job.sharded_optimizer, job.world, Hook(self, Engine._divisor))
        self._keeper = Keeper(job)
        _open_engines.add(self)
        self._model.sync = Hook(self, Engine._sync)
        self._model.on_thaw = Hook(self, Engine._thaw)
        if job.config.fp16.enabled:
            self._model.on_output = Hook(self, Engine._scale_outputs)
        if self.optimizer is not None:
            self.optimizer.zero_grad = Hook(self, Engine._zero_grad)  # type: ignore[method-assign,assignment]

    # -- forward and backward -----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. Under bf16 and fp16, fp32 inputs are cast to the compute dtype."""
        self._progress("forward")
        self._keeper.check()
        dtype = self._job.compute_dtype
        if dtype is not None:

            def cast(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor

            args, kwargs = map_tensors(args, cast), map_tensors(kwargs, cast)
        return self.module(*args, **kwargs)

    forward = __call__

    def backward(self, loss: torch.Tensor, tokens: int | torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass of `loss`, a scalar. Returns it.

        Without `tokens`, gradients are averaged over micro batches and ranks. With `tokens`, `loss` is a sum over that many
        tokens of this micro batch, and the step divides by the tokens of the whole global batch, however they are spread.
        `kwargs` go to `Tensor.backward`. Raises ZerotrainError for a loss that is not a scalar, or when some calls of a
        window give tokens and others do not. An exception forgets the window's gradients; training may go on.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ZerotrainError(
                f"engine.backward needs a scalar loss, not {shape}; reduce it (loss.mean(), or loss.sum() with tokens=)"
            )
        self._progress("backward")
        self._window.add(loss, tokens)
        self.driven = True
        try:
            self._model.begin_backward(driven=True)
            scale = self._loss_scale.scale
            (loss if scale == 1.0 else loss.float() * scale).backward(**kwargs)
            self._model.end_backward()
        except BaseException:
            self._forget()
            raise
        finally:
            self.driven = False
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not reduced over the ranks; the next one outside, or the step, reduces their sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the open window; the step averages over the micro batches that follow in it."""
        del set_to_none
        self._model.clear_window()
        self._window = Window()

    # -- step ---------------------------------------------------------------------------------------------------------

    def step(self, boundary: bool | None = None) -> bool:
        """End a micro batch; at the accumulation boundary, step the optimizer. True if weights were updated.

        `boundary=True` closes the window here and averages over the micro batches it holds; `False` keeps it open. The
        default closes it after `gradient_accumulation_steps`. A step with a gradient that is not finite is skipped on all
        ranks alike (`skipped_steps`), and the scheduler does not advance.
        """
        if self.optimizer is None or self._sharded_optimizer is None:
            raise ZerotrainError(
                "this engine has no optimizer; give initialize() one, or an `optimizer` section in the config"
            )
        self._progress("step")
        if self._model.in_backward:
            self._forget()
            raise ZerotrainError("the last backward did not finish; its window was forgotten, and training can go on")
        self.micro_steps += 1
        self._window.micro_batches += 1
        at_boundary = self.micro_steps >= self.gradient_accumulation_steps if boundary is None else boundary
        if not at_boundary:
            return False
        try:
            return self._close_window()
        except BaseException:
            self._forget()
            raise

    def train_batch(self, data: Iterable[Any]) -> float:
        """One whole window from an iterator of micro batches: forward, backward, step. The mean loss over all ranks.

        A model that takes keyword arguments gets a dict batch as such; anything else is passed as the one argument.
        Raises StopIteration when the data ends before the window began; one cut short by the end is closed early.
        """
        batches = iter(data)
        for index in range(self.gradient_accumulation_steps):
            try:
                batch = next(batches)
            except StopIteration:
                if index == 0:
                    raise
                self.micro_steps -= 1
                self._window.micro_batches -= 1
                self.step(boundary=True)
                break
            output = self(**batch) if isinstance(batch, dict) else self(batch)
            self.backward(output if isinstance(output, torch.Tensor) else loss_of(output))
            self.step()
        return self.metrics["loss"]

    def _close_window(self) -> bool:
        """Reduce what is left, agree on the norm, and step or skip."""
        model, optimizer = self._model, self._sharded_optimizer
        assert optimizer is not None
        optimizer.adopt_groups()
        model.reductions.settle()
        seen = agree(self._job, self._window, self._norm_order, int(self._keeper.saver.failed))
        model.adopt_edits()
        divisor = self._mean_divisor(seen.tokens, seen.counted, seen.micro_batches) * self._loss_scale.scale
        self._norm = seen.norm / divisor if divisor else math.nan
        finite = math.isfinite(self._norm)
        if finite:
            optimizer.step(self._factor(divisor))
            model.updated()
            model.agree_on_order(lambda mine: self._job.world.exchange_object(mine, "order of units"))
        else:
            reason = reason_to_skip(self._job, divisor)
            optimizer.detach_gradients()
            self.skipped_steps += 1
            self._log.skipped(self.global_steps + 1, reason, self._loss_scale.scale, self.skipped_steps)
        if seen.changed_buffers:
            self._job.buffers.synchronise()
        self._loss_scale = self._loss_scale.after(overflow=not finite)
        self._count(finite, seen)
        if seen.failures:  # on any rank: all raise after the same step, which has been taken
            self._keeper.saver.raise_failure(elsewhere=True)
        return finite

    def _factor(self, divisor: float) -> float:
        """What gradient sums are multiplied by: the mean, and the clipping that `clip_grad_norm_` would do."""
        limit = self.config.gradient_clipping
        assert self._norm is not None
        return (min(1.0, limit / (self._norm + 1e-6)) if limit else 1.0) / divisor

    def _count(self, stepped: bool, seen: report.Report) -> None:
        assert self._norm is not None
        self.metrics = {
            "loss": seen.mean_loss,
            "grad_norm": self._norm,
            "lr": self.get_lr()[0],
            "tokens": seen.tokens,
            "loss_scale": self._loss_scale.scale,
            "skipped_steps": self.skipped_steps,
        }
        if stepped and self.lr_scheduler is not None and not isinstance(self.lr_scheduler, ReduceLROnPlateau):
            self.lr_scheduler.step()
        self.global_steps += 1
        self.samples += seen.micro_batches * self.train_micro_batch_size_per_gpu * self.world_size
        self.tokens += seen.tokens
        self.micro_steps = 0
        self._window = Window()
        self._keeper.boundary.mark()
        self._model.clear_window()
        self._log.step(self.global_steps, self.metrics)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, directory: str | Path | None = None, tag: str | None = None, client_state: Any = None
    ) -> Path:
        """Write a checkpoint of everything that training needs to go on; the folder it is in. Collective.

        Args:
            directory: folder of the checkpoints; default: the config's `checkpoint.directory`.
            tag: name of this one; default: `step-` and the number of steps. One of the same name is replaced.
            client_state: of rank 0, anything that JSON (with tuples, bytes, small tensors and arrays) can hold.

        The checkpoint is of the end of the last step: micro batches of an open window will be trained on again. Under
        `checkpoint.async` this returns when the states are copied, and an error of writing comes out of a later `step`,
        save or `close`. Raises CheckpointError, on every rank; the last checkpoint is still there then.
        """
        self._progress("save_checkpoint")
        return self._keeper.save(directory, tag, self._come_so_far(), self.micro_steps, client_state)

    def load_checkpoint(
        self,
        directory: str | Path | None = None,
        tag: str | None = None,
        *,
        strict: bool = True,
        weights_only: bool = False,
        verify: bool | None = None,
    ) -> Loaded:
        """Load what `save_checkpoint` wrote in any layout, or weights of another origin. Returns `(path, client_state)`.

        Args:
            directory: folder of checkpoints, one checkpoint, or a Hugging Face, DeepSpeed or torch.distributed.checkpoint
                folder or file; default: the config's `checkpoint.directory`.
            tag: which checkpoint of the folder; default: the latest.
            strict: raise for tensors that are missing, too many or of another shape; False logs them and goes on.
            weights_only: leave step count, scheduler, RNG and data alone, and start the optimizer's state afresh.
            verify: check all checksums first; default: the config's `checkpoint.verify`.

        The gradients of an open window are forgotten. Raises CheckpointError on every rank, before anything is changed;
        where reading fails half-way, the engine refuses to train until a load has succeeded.
        """
        self._progress("load_checkpoint")
        options = Options(strict, weights_only, verify)
        loaded, progress = self._keeper.load(directory, tag, options, self._forget, self._come_so_far())
        self.global_steps, self.skipped_steps = progress.step, progress.skipped_steps
        self.samples, self.tokens, self._loss_scale = progress.samples, progress.tokens, progress.loss_scale
        self.client_state = loaded.client_state
        return loaded

    def resume(self) -> Loaded | None:
        """Load the newest good checkpoint of the config's `checkpoint.directory`; None where there is none yet.

        Damaged ones are passed over, with a warning. CheckpointError where none of those that there are can be loaded.
        """
        root = self._keeper.folder(None)
        return load_newest(self._job, root, lambda tag: self.load_checkpoint(root, tag))

    def _come_so_far(self) -> Progress:
        return Progress(self.global_steps, self.skipped_steps, self.samples, self.tokens, self._loss_scale)

    # -- what scripts ask ---------------------------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Global norm of the last step's mean gradient, before clipping, equal on all ranks; None before the first."""
        return self._norm

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    @property
    def loss_scale(self) -> float:
        """What fp16 losses are multiplied by; 1.0 in other dtypes."""
        return self._loss_scale.scale

    @property
    def traffic(self) -> Traffic:
        """Counters of what this rank has sent."""
        return self._job.traffic

    @property
    def units(self) -> list[Unit]:
        """What is gathered and reduced together, in the order of the model."""
        return list(self._model.units)

    def train(self, mode: bool = True) -> Engine:
        """Put the model into training mode, or with `mode=False` into evaluation mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the model into evaluation mode."""
        return self.train(False)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of model states alive on this rank, by kind: parameters, master, gradients, optimizer."""
        return self._job.held_bytes()

    def close(self) -> None:
        """Finish the checkpoint that is being written, detach from the model, and give the memory back.

        Also done when the engine is deleted, and at the end of the program. Raises CheckpointError where a checkpoint could
        not be written in the background and nobody was told yet.
        """
        try:
            self._keeper.close()
        finally:
            self._job.close()

    def __del__(self) -> None:
        if hasattr(self, "_keeper"):
            self.close()

    # -- inner --------------------------------------------------------------------------------------------------------

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self.zero_grad(set_to_none)

    def _sync(self) -> Sync:
        """What a backward that begins now does with its gradients."""
        final = self.micro_steps + 1 >= self.gradient_accumulation_steps
        syncing = self._syncing and not self._model.alone
        return Sync(reduce=syncing and (final or self._model.plan.policy.shard_gradients), final=syncing and final)

    def _thaw(self) -> None:
        thaw(self._access, self._job.options)

    def _scale_outputs(self, output: Any) -> Any:
        return map_tensors(output, lambda t: scaled_gradient(t, self) if t.requires_grad else t)

    def _mean_divisor(self, tokens: float, counted: bool, micro_batches: int) -> float:
        return tokens if counted else float(max(1, micro_batches) * self.world_size)

    def _divisor(self) -> float:
        """Of the open window as far as it has come; the micro batch in progress counts once it had a backward."""
        window = self._window
        tokens = float(window.tokens)
        if window.counted:
            row = torch.tensor([tokens], dtype=torch.float64, device=self._job.world.device)
            tokens = float(self._job.world.exchange(row, "tokens").sum())
        begun = self._model.backwards_since_step > window.micro_batches
        return self._mean_divisor(tokens, window.counted, window.micro_batches + int(begun)) * self._loss_scale.scale

    def _forget(self) -> None:
        """After an exception: the window starts over. Where ranks have parted there is nothing left to put in order."""
        if self._job.watch.broken:
            return
        self._model.reset()
        if self._sharded_optimizer is not None:
            self._sharded_optimizer.detach_gradients()
        self.micro_steps = 0
        self._window = Window()

    def _progress(self, phase: str) -> None:
        self._job.watch.progress = f"step {self.global_steps + 1}, micro batch {self.micro_steps + 1}, {phase}"
