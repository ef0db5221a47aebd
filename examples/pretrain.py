"""Train a byte-level language model on real text, sharded over the ranks that the launcher starts.

    accelerate launch --config_file configs/launch/two_ranks.yaml examples/pretrain.py --config configs/zero2.json

The text is the source code of Python's standard library, found on the machine, or any folder given by `--data` (on
several nodes: the same files on each). The script runs on CPUs and on accelerators, with any config in `configs/`. Where the
config names a folder for checkpoints, it saves there; started again, it goes on where it was.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from tqdm import tqdm

import zerotrain
from gpt import BYTES, GPT, GPTConfig

EVALUATION_BATCHES = 16
SAMPLE_BYTES = 200


def main() -> None:
    """Train, evaluate on held-out text, show a sample."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    train, held_out = split(read_text(args.data), args.seq_len)
    engine, _, loader, _ = zerotrain.initialize(model=build_model(args), training_data=train, config=args.config)

    steps = args.steps or scheduled_steps(engine) or 300
    if engine.rank == 0:
        print(describe(engine), flush=True)
    progress = Progress(engine, steps, args.seq_len)
    batches = endless(loader)
    while engine.global_steps < steps:
        loss = engine(**next(batches))
        engine.backward(loss)
        engine.step()
        progress.update()
        if is_time_to_save(engine, args.save_every, steps):
            engine.save_checkpoint()
    progress.close()

    loss_held_out = evaluate(engine, held_out)
    sample = generate(engine, args.prompt, args.seed)
    if engine.rank == 0:
        if progress.first_loss is not None:
            print(f"training loss {progress.first_loss:.3f} -> {progress.last_loss:.3f} in {steps} steps")
        print(f"held-out loss {loss_held_out:.3f}")
        print(f"sample:\n{sample}")
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the JSON job file, see configs/README.md")
    parser.add_argument("--data", type=Path, help="a folder of text (default: Python's standard library)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: those of the config's scheduler, or 300)")
    parser.add_argument(
        "--save-every", type=int, default=100, help="optimizer steps, where the config has a folder for it"
    )
    parser.add_argument("--model", choices=["gpt", "llama"], default="gpt", help="llama needs the extra `hf`")
    parser.add_argument("--seq-len", type=int, default=128, help="bytes in a training window")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128, help="width of the model, a multiple of --heads")
    parser.add_argument("--seed", type=int, default=1234, help="of the initial weights and the sample")
    parser.add_argument("--prompt", default="def ", help="what the sample begins with")
    args = parser.parse_args()
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps {args.steps}: at least 1")
    return args


def is_time_to_save(engine: zerotrain.Engine, every: int, steps: int) -> bool:
    """Whether the step that has just ended is one to save after."""
    if engine.config.checkpoint.directory is None or engine.micro_steps:
        return False
    return engine.global_steps % every == 0 or engine.global_steps == steps


# -- the text ---------------------------------------------------------------------------------------------------------


def read_text(folder: Path | None) -> Tensor:
    """All text files under `folder`, in an order that is shuffled but equal on all ranks, as one uint8 tensor."""
    if folder is None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [p for p in root.rglob("*.py") if not {"site-packages", "dist-packages", "test", "tests"} & {*p.parts}]
    else:
        root = folder
        paths = [p for p in root.rglob("*") if p.is_file()]
    paths.sort()
    random.Random(0).shuffle(paths)
    contents = (path.read_bytes() for path in paths)
    text = bytearray().join(content for content in contents if b"\0" not in content)
    if not text:
        raise SystemExit(f"{root}: no text found there; give a folder of text with --data")
    return torch.frombuffer(text, dtype=torch.uint8)


def split(text: Tensor, context: int) -> tuple[Windows, Windows]:
    """The last twentieth (at least one window) is held out from training."""
    held_out = max(len(text) // 20, context + 1)
    if len(text) - held_out <= context:
        raise SystemExit(f"{len(text)} bytes of text are too few for windows of --seq-len {context}; give more text")
    return Windows(text[:-held_out], context), Windows(text[-held_out:], context)


class Windows(Dataset[dict[str, Tensor]]):
    """Windows that follow one another: `tokens` and, one byte further, `targets`, both int64 (context,)."""

    def __init__(self, text: Tensor, context: int) -> None:
        self._text = text
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self._context
        window = self._text[start : start + self._context + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


def endless(loader: Any) -> Iterator[dict[str, Tensor]]:
    """Epoch after epoch."""
    while True:
        yield from loader


# -- the model --------------------------------------------------------------------------------------------------------


def build_model(args: argparse.Namespace) -> nn.Module:
    """The model that the command line asks for."""
    config = GPTConfig(context=args.seq_len, layers=args.layers, heads=args.heads, width=args.hidden)
    return GPT(config) if args.model == "gpt" else ByteLlama(config)


class ByteLlama(nn.Module):
    """The Llama of transformers over bytes, with the interface of `GPT`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise SystemExit("--model llama needs transformers: pip install -e '.[hf]' -c constraints.txt") from error
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=BYTES,
                hidden_size=config.width,
                intermediate_size=4 * config.width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                max_position_embeddings=config.context + SAMPLE_BYTES,
                bos_token_id=None,
                eos_token_id=None,
            )
        )

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """As `GPT.forward`."""
        logits = self.llama(input_ids=tokens, use_cache=False).logits
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def generate(self, tokens: Tensor, length: int, temperature: float = 0.8) -> Tensor:
        """As `GPT.generate`, by transformers' own loop."""
        return self.llama.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=length,
            do_sample=True,
            temperature=temperature,
            pad_token_id=0,
        )


# -- what is shown ----------------------------------------------------------------------------------------------------


def describe(engine: zerotrain.Engine) -> str:
    """One line on what is about to train, and where."""
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    return (
        f"{parameters / 1e6:.2f} M parameters, stage {engine.config.zero_optimization.stage}, "
        f"world size {engine.world_size}, {engine.device.type}, {engine.train_batch_size} windows per step"
    )


class Progress:
    """The bar of rank 0."""

    def __init__(self, engine: zerotrain.Engine, steps: int, context: int) -> None:
        self._engine = engine
        self._tokens_per_step = engine.train_batch_size * context
        self._begun_at = engine.global_steps
        self._bar = tqdm(total=steps, initial=self._begun_at, unit="step", disable=engine.rank != 0, dynamic_ncols=True)
        self._started = time.perf_counter()
        self.first_loss: float | None = None
        self.last_loss = float("nan")

    def update(self) -> None:
        """Show the last step, if the micro batch just ended closed one."""
        engine = self._engine
        if engine.global_steps == self._bar.n or engine.rank != 0:
            return
        self.last_loss = engine.metrics["loss"]
        self.first_loss = self.last_loss if self.first_loss is None else self.first_loss
        tokens = (engine.global_steps - self._begun_at) * self._tokens_per_step
        self._bar.set_postfix_str(
            f"loss {self.last_loss:.3f}, lr {engine.metrics['lr']:.1e}, grad norm {engine.metrics['grad_norm']:.2f}, "
            f"{tokens / (time.perf_counter() - self._started):,.0f} tokens/s, {memory_in_use(engine.device)}",
            refresh=False,
        )
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


def memory_in_use(device: torch.device) -> str:
    """Peak memory of this rank: the accelerator's where there is one, else what the process had resident."""
    if device.type != "cpu":
        return f"{torch.accelerator.max_memory_allocated(device) / 2**20:,.0f} MiB"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:,.0f} MiB"


def scheduled_steps(engine: zerotrain.Engine) -> int | None:
    """How many steps the scheduler of the config was made for, if it says so."""
    scheduler = engine.config.scheduler
    return None if scheduler is None else scheduler.params.get("total_num_steps")


# -- after training ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(engine: zerotrain.Engine, windows: Windows) -> float:
    """Mean loss on held-out text over all ranks; every rank takes other windows, and the same number of them."""
    rows, world = engine.train_micro_batch_size_per_gpu, engine.world_size
    batches = max(1, min(EVALUATION_BATCHES, len(windows) // (rows * world)))
    engine.eval()
    total = torch.zeros((), device=engine.device)
    for index in range(batches):
        first = (index * world + engine.rank) * rows
        samples = [windows[(first + row) % len(windows)] for row in range(rows)]
        batch = {key: torch.stack([sample[key] for sample in samples]).to(engine.device) for key in samples[0]}
        total += engine(**batch).float()
    if world > 1:
        dist.all_reduce(total)
    engine.train()
    return total.item() / (batches * world)


@torch.no_grad()
def generate(engine: zerotrain.Engine, prompt: str, seed: int) -> str:
    """`prompt` continued. All ranks generate the same bytes together: under stage 3 each holds only a share.

    A young model also samples bytes that a terminal should not see; they are shown as question marks.
    """
    torch.manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())], device=engine.device)
    engine.eval()
    output = engine.module.generate(tokens, SAMPLE_BYTES)
    engine.train()
    text = bytes(output[0].tolist()).decode("ascii", errors="replace")
    return "".join(c if c == "\n" or (c.isascii() and c.isprintable()) else "?" for c in text)


if __name__ == "__main__":
    main()
