"""Owns the recipe `gpt`: a byte-level language model with one dial, its depth.

It knows nothing of hosts, guests or runs: it says what is trained, on what, and how the result is shown.

Sizes at head size 64: depth 4 has 3.3 M parameters; depth 12 with sequence 1024 is GPT-2 124M, with a table of
50,304 tokens that is tied to the head, though the text's tokens are bytes and use 256 of them: so it has the size,
the speed and the traffic of the model that people train. The default, depth 2, has 0.48 M: in two minutes on two
cores it comes further than a larger model would.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from potluck.errors import ConfigError
from potluck.train.recipes import corpus
from potluck.train.recipes.modes import (
    Compile,
    Precision,
    any_size,
    compile_for_all_sizes,
    compiled,
    evaluating,
    fused,
    precision,
)
from potluck.train.recipes.schedule import warmup_cosine

if TYPE_CHECKING:
    from potluck.train.recipes import Recipe

BYTES = 256
GPT2_DEPTH, GPT2_VOCABULARY = 12, 50_304
"""GPT-2's smallest model; its 50,257 tokens are rounded up to what matrix units like."""
HEAD_SIZE = 64
_VALIDATION_SAMPLES = 256
_VALIDATION_BATCH = 16
_GENERATED_BYTES = 300
_PYTHON_PROMPT = "class Stream:\n    def __init__(self, "
_GENERATION_CONTEXT = 256
_GENERATION_LIMIT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """What a run of the recipe `gpt` can be told."""

    depth: int = 2
    """The one dial: blocks. The width is 64 times as much, and there are as many heads."""

    sequence: int = 128
    """Bytes that a sample predicts, and the longest context the model sees."""

    batch_tokens: int = 4096
    """Bytes that one step learns from, on all machines together."""

    steps: int = 600
    """Optimizer updates in the run."""

    lr: float | None = None
    """Peak learning rate; left out, it follows from the depth (less for wider models)."""

    warmup: int = 40
    """Steps over which the learning rate rises to its peak; at most a fifth of the run."""

    weight_decay: float = 0.1
    """AdamW's decay of matrices; biases, norms and embeddings of positions have none."""

    clip_norm: float = 1.0
    """Gradients longer than this are scaled down to it; 0 leaves them as they are."""

    precision: Precision = "auto"
    """Number format of the matrix products (autocast), bf16 on CUDA if left out; weights stay fp32."""

    compile: Compile = "auto"
    """Whether torch.compile makes the model faster; left out, on a host with CUDA."""

    vocabulary: int | None = None
    """Tokens in the model's table: 256, the bytes, or more; left out, GPT-2's from depth 12 on."""

    data: str | None = None
    """A text file or a folder of them; left out, the sources of the Python standard library."""

    prompt: str | None = None
    """How the generated text starts; left out, the head of a class for Python and a new line for other text."""

    temperature: float = 0.7
    """How freely the text is generated: 0 takes the likeliest byte."""

    top_k: int = 40
    """Only this many of the likeliest bytes are drawn from."""

    seed: int = 1
    """Of the initial weights, the order of the samples and the generated text."""

    def __post_init__(self) -> None:
        for name in ("depth", "sequence", "batch_tokens", "steps", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint=f"{name} must be 1 or more")
        for name in ("warmup", "weight_decay", "clip_norm", "temperature", "seed"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint=f"{name} must be 0 or more")
        if self.vocabulary is not None and self.vocabulary < BYTES:
            raise ConfigError(f"vocabulary is {self.vocabulary}", hint="a text has 256 bytes: 256 or more")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ConfigError(f"lr is {self.lr}", hint="lr must be above 0, for example 0.001")
        if self.batch_tokens < self.sequence:
            raise ConfigError(
                f"batch_tokens is {self.batch_tokens}, less than one sample of {self.sequence} bytes",
                hint=f"batch_tokens must be {self.sequence} (one sequence) or more",
            )

    @property
    def width(self) -> int:
        return HEAD_SIZE * self.depth

    @property
    def tokens(self) -> int:
        """Rows of the table of tokens."""
        return self.vocabulary or (GPT2_VOCABULARY if self.depth >= GPT2_DEPTH else BYTES)

    @property
    def global_batch(self) -> int:
        """Samples in a step."""
        return self.batch_tokens // self.sequence

    @property
    def peak_lr(self) -> float:
        """The learning rate of this depth: GPT-2's 6e-4 at width 768, more for narrower models."""
        return self.lr if self.lr is not None else 6e-4 * 768 / self.width


class Block(nn.Module):
    """Attention and a perceptron, each added to what came in, each normalised before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, time, width), and so is what comes back."""
        batch, time_, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time_, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, head size)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time_, width))
        added: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))
        return x + added


class GPT(nn.Module):
    """Bytes in, a score for every next byte out."""

    def __init__(self, *, depth: int, width: int, heads: int, sequence: int, tokens: int = BYTES) -> None:
        super().__init__()
        self.sequence = sequence
        self.bytes = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        if tokens > BYTES:
            self.head.weight = self.bytes.weight
        self._initialise(depth, width)

    def _initialise(self, depth: int, width: int) -> None:
        # GPT-2's 0.02 is 0.55 / sqrt(width) at its own width and far too little for narrow models: measured at
        # widths 128, 192 and 384, 0.8 / sqrt(width) reaches in 300 to 650 steps a loss lower by 0.15 and more.
        std = 0.8 / math.sqrt(width)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                # Every block adds twice to one sum: scaled so that its variance does not grow with depth.
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=std / math.sqrt(2 * depth) if residual else std)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens, targets: (batch, time) of int64 -> scores (batch, time, tokens), or their mean loss.

        The loss belongs to the model because a compiled one can then do without writing the scores down.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.bytes(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        if targets is None:
            return scores
        return F.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


class GptRecipe:
    """Everything a run of the byte-level GPT needs."""

    name = "gpt"
    Config = GptConfig

    def model(self, config: GptConfig) -> GPT:
        """The initial model, on the CPU, the same for the same seed; the caller's chances are untouched."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return GPT(
                depth=config.depth,
                width=config.width,
                heads=config.depth,
                sequence=config.sequence,
                tokens=config.tokens,
            )

    def compile(self, model: nn.Module, config: GptConfig, device: torch.device, *, guest: bool) -> None:
        if compiled(config.compile, device, guest=guest):
            compile_for_all_sizes(model)

    def optimizer(self, model: nn.Module, config: GptConfig) -> torch.optim.AdamW:
        """AdamW with decay on matrices only."""
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        decayed = [p for name, p in trained if p.dim() > 1 and name != "positions.weight"]
        others = [p for name, p in trained if p.dim() <= 1 or name == "positions.weight"]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        one_pass = fused(p for _, p in trained) or None
        return torch.optim.AdamW(groups, lr=config.peak_lr, betas=(0.9, 0.95), fused=one_pass)

    def scheduler(self, optimizer: torch.optim.Optimizer, config: GptConfig) -> LambdaLR:
        """Up in a straight line over `warmup` steps, then down a cosine to a tenth at the last step."""
        return warmup_cosine(optimizer, steps=config.steps, warmup=config.warmup)

    def dataset(self, config: GptConfig) -> corpus.Windows:
        """The windows of the text but for its tail."""
        text = corpus.open_corpus(config.data)
        return corpus.split(text, sequence=config.sequence, needed=config.global_batch)[0]

    def loss(self, model: nn.Module, batch: Tensor, config: GptConfig) -> Tensor:
        """Mean cross entropy in nats a byte. batch: (samples, sequence + 1) of uint8."""
        tokens, targets = batch[:, :-1].long(), batch[:, 1:].long()
        with any_size(model, tokens, targets), precision(batch.device, config.precision):
            loss: Tensor = model(tokens, targets)
        return loss

    def tokens_per_sample(self, config: GptConfig) -> int | None:
        return config.sequence

    def validation(self, model: nn.Module, config: GptConfig, device: torch.device) -> float | None:
        """Mean loss over windows spread evenly over the held-out tail."""
        text = corpus.open_corpus(config.data)
        held_out = corpus.split(text, sequence=config.sequence, needed=config.global_batch)[1]
        chosen = range(0, len(held_out), max(1, len(held_out) // _VALIDATION_SAMPLES))[:_VALIDATION_SAMPLES]
        total = 0.0
        with evaluating(model):
            for start in range(0, len(chosen), _VALIDATION_BATCH):
                samples = held_out.__getitems__(chosen[start : start + _VALIDATION_BATCH])
                total += self.loss(model, torch.stack(samples).to(device), config).item() * len(samples)
        return total / len(chosen)

    def finish(self, model: nn.Module, config: GptConfig, device: torch.device) -> str:
        """A few lines that the model wrote."""
        prompt = config.prompt or (_PYTHON_PROMPT if config.data is None else "\n")
        with evaluating(model):
            return readable(generate(model, prompt.encode(), config, device))


def generate(model: nn.Module, prompt: bytes, config: GptConfig, device: torch.device) -> bytes:
    """The prompt and some 300 bytes after it; fewer where this machine would need too long for them."""
    # Drawn on the CPU: the same seed gives the same text on every device.
    chance = torch.Generator().manual_seed(config.seed)
    written = list(prompt)
    context = min(config.sequence, _GENERATION_CONTEXT)
    deadline = time.monotonic() + _GENERATION_LIMIT_S
    while len(written) < len(prompt) + _GENERATED_BYTES and time.monotonic() < deadline:
        with precision(device, config.precision):
            scores = model(torch.tensor([written[-context:]], device=device))[0, -1, :BYTES].float().cpu()
        if config.temperature == 0:
            written.append(int(scores.argmax()))
            continue
        best, candidates = scores.topk(min(config.top_k, BYTES))
        drawn = torch.multinomial(torch.softmax(best / config.temperature, dim=0), 1, generator=chance)
        written.append(int(candidates[drawn]))
    return bytes(written)


def readable(text: bytes) -> str:
    """Text that is safe on a terminal: control characters and bytes that are no UTF-8 become signs."""
    # The picture of a control character stands 0x2400 above it in Unicode.
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else chr(0x2400 + ord(character))
        if ord(character) < 0x20
        else "\N{REPLACEMENT CHARACTER}"
        for character in text.decode(errors="replace")
    )


RECIPE: Recipe = GptRecipe()
