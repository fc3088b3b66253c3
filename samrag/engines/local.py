"""A Hugging Face vision-language model in this process, with or without its adapter.

Decoding is a loop of our own: rows leave the batch as soon as their JSON object is whole, the cache grows in place
instead of being copied at every step, and each row draws from its own random numbers, so that a reply does not depend
on the batch it was in.

Left out: models that place images in more than one position dimension (M-RoPE, such as Qwen-VL), state-space layers,
several images in a prompt, and constrained decoding beyond direct verdicts. For those, serve the model and use
`samrag.engines.api`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from samrag.calls import JUDGEMENTS, CallKind, Failure, FailureReason
from samrag.engines.base import RawReply, Request
from samrag.errors import UserError
from samrag.files import sha256, within
from samrag.images import IMAGE_ERRORS
from samrag.prompts import Prompt
from samrag.replies import write
from samrag.schema import ChatMessage
from samrag.training.student import check_adapter, check_base, check_templates
from samrag.vlm import ChatProcessor, Picture, load_adapter, load_model

_IMAGE_CACHE_BYTES = 512 << 20
_CACHE_HEADROOM = 64  # tokens by which a key-value buffer is longer than what it holds
_COMPACT_SHARE = 0.25  # share of finished rows at which a batch is made smaller
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_JSON = json.JSONDecoder()


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values in a buffer with headroom: a step writes one column instead of copying all the others.

    transformers' own layer concatenates at every step, which costs more than the attention for small models.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states[B, H, T, D]; returns all keys and values so far."""
        start = self.get_seq_length() if self.is_initialized else 0
        end = start + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self._buffers or end > self._buffers[0].shape[-2]:
            held = (self.keys, self.values) if start else ()
            self._buffers = [
                new.new_empty((*new.shape[:2], end + _CACHE_HEADROOM, new.shape[-1]))
                for new in (key_states, value_states)
            ]
            for buffer, old in zip(self._buffers, held, strict=False):
                buffer[:, :, :start] = old
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch."""
        length = self.get_seq_length()
        self._buffers = [buffer.index_select(0, indices) for buffer in self._buffers]
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)


@dataclass(slots=True)
class _Row:
    """A request on its way through the model."""

    position: int
    tokens: list[int]
    picture: Picture | None
    limit: int
    """Most new tokens: `max_tokens`, or what the context leaves."""
    temperature: float
    seed: int
    candidates: list[int] = field(default_factory=list)
    """Of a direct verdict: the first token of each verdict that the kind has; the prompt then ends before it."""
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    probabilities: list[float] = field(default_factory=list)
    """Of the candidates, among one another."""


def _is_whole(text: str) -> bool:
    """Whether the JSON object that begins at the first brace is complete."""
    start = text.find("{")
    try:
        return start >= 0 and bool(_JSON.raw_decode(text, start))
    except (json.JSONDecodeError, RecursionError):
        return False


class _TunedWeights:
    """The adapter's layers with its product added to their weights: one matrix product a layer instead of three.

    Base and tuned weights are both kept, so that switching is exact both ways; that takes the memory of the adapted
    layers once more. In float32 alone: in half precision the sum would round the adapter away in part.
    """

    def __init__(self, layers: Sequence[Any], adapter: str) -> None:
        weights = [layer.get_base_layer().weight for layer in layers]
        with torch.no_grad():
            products = [layer.get_delta_weight(adapter) for layer in layers]
            self._pairs = [(w, w.data, w.data + product) for w, product in zip(weights, products, strict=True)]

    @classmethod
    def of(cls, peft_model: Any) -> _TunedWeights | None:
        """The weights of a plain LoRA on float32 linear layers; None for any other adapter."""
        from peft.tuners.lora import Linear, LoraLayer

        (adapter,) = peft_model.active_adapters
        config = peft_model.peft_config[adapter]
        if getattr(config, "bias", None) != "none" or getattr(config, "modules_to_save", None):
            return None
        layers = [module for module in peft_model.modules() if isinstance(module, LoraLayer)]
        plain = all(
            type(layer) is Linear
            and layer.get_base_layer().weight.dtype == torch.float32
            and not layer.lora_variant
            and not any(layer.lora_bias.values())
            for layer in layers
        )
        return cls(layers, adapter) if layers and plain else None

    def switch(self, on: bool) -> None:
        """Put the tuned weights, or the base's, in place."""
        for weight, base, tuned in self._pairs:
            weight.data = tuned if on else base


class _Decoder:
    """The weights, and the loop over them. One thread at a time."""

    def __init__(self, model: Any, peft_model: Any) -> None:
        self.model = model
        self.peft_model = peft_model
        self._tuned = None if peft_model is None else _TunedWeights.of(peft_model)
        self.config: Any = model.config
        self.device = next(model.parameters()).device
        self.context: int = self.config.get_text_config().max_position_embeddings
        self._last_only = "logits_to_keep" in inspect.signature(model.forward).parameters
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self._ends: set[int] = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)

    @contextlib.contextmanager
    def _adapter(self, on: bool) -> Iterator[None]:
        if self._tuned is not None:
            self._tuned.switch(on)
        bypassed = self.peft_model is not None and (self._tuned is not None or not on)
        with self.peft_model.disable_adapter() if bypassed else contextlib.nullcontext():
            yield

    @torch.inference_mode()
    def run(self, rows: list[_Row], chat: ChatProcessor, adapter_on: bool, cancelled: Callable[[], bool]) -> None:
        """Decode one batch; fills `new_tokens` and `finish_reason` of its rows."""
        try:
            with self._adapter(adapter_on):
                if rows[0].candidates:
                    self._choose(rows, chat)
                else:
                    self._decode(rows, chat, cancelled)
        except torch.OutOfMemoryError as error:
            if len(rows) == 1:
                raise UserError(
                    f"a single prompt of {len(rows[0].tokens)} tokens does not fit into the memory of {self.device};"
                    " use a smaller model, a smaller dtype or another device."
                ) from error
        else:
            return
        torch.cuda.empty_cache()
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            for row in half:
                row.new_tokens, row.finish_reason = [], "length"
            self.run(half, chat, adapter_on, cancelled)

    def _prompts(
        self, rows: list[_Row], chat: ChatProcessor, steps: int
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """The model's inputs for B prompts of W tokens at most, padded on the left.

        Also the mask[B, W + steps] and the positions[B, W + steps] with room for new tokens.
        """
        width, device = max(len(row.tokens) for row in rows), self.device
        pad = chat.pad_token_id
        ids = torch.tensor([[pad] * (width - len(row.tokens)) + row.tokens for row in rows], device=device)
        lengths = torch.tensor([len(row.tokens) for row in rows], device=device)
        columns = torch.arange(width + steps, device=device)
        mask = columns >= width - lengths[:, None]
        positions = (columns - (width - lengths[:, None])).clamp(0, self.context - 1)
        given = chat.inputs(ids, mask[:, :width], [row.picture for row in rows if row.picture])
        given = {
            name: value.to(device, self.model.dtype if value.is_floating_point() else None)
            for name, value in given.items()
        }
        return {**given, "position_ids": positions[:, :width]}, mask, positions

    def _choose(self, rows: list[_Row], chat: ChatProcessor) -> None:
        """Direct verdicts: one step, the probability of each candidate for the next token among the candidates."""
        given, _, _ = self._prompts(rows, chat, 0)
        logits = self.model(**given, use_cache=False, **({"logits_to_keep": 1} if self._last_only else {})).logits
        for row, own in zip(rows, logits[:, -1].float(), strict=True):
            row.probabilities = own[row.candidates].softmax(-1).tolist()

    def _decode(self, rows: list[_Row], chat: ChatProcessor, cancelled: Callable[[], bool]) -> None:
        """B rows, W the longest prompt, S the most new tokens."""
        device, steps = self.device, max(row.limit for row in rows)
        given, mask, positions = self._prompts(rows, chat, steps)
        width = given["input_ids"].shape[1]
        limits = torch.tensor([row.limit for row in rows], device=device)
        ends = self._ends | ({chat.tokenizer.eos_token_id} - {None})
        draw = _Draw(rows, steps, device)
        options: dict[str, Any] = {"use_cache": True, "past_key_values": Cache(layer_class_to_replicate=_GrowingLayer)}
        if self._last_only:
            options["logits_to_keep"] = 1
        output = self.model(**given, **options)
        stops = torch.zeros(
            output.logits.shape[-1], dtype=torch.bool
        )  # the model may have more rows than the tokenizer
        stops[: len(chat.closing)] = chat.closing
        stops[list(ends)] = True
        stops = stops.to(device)
        written = torch.empty((len(rows), steps), dtype=torch.long, device=device)
        running = torch.ones(len(rows), dtype=torch.bool, device=device)
        for step in range(steps):
            if cancelled():
                return
            tokens = draw(output.logits[:, -1], step)
            written[:, step] = tokens
            looked_at = running & (stops[tokens] | (limits == step + 1))
            if looked_at.any():
                for i in looked_at.nonzero()[:, 0].tolist():
                    if self._ended(rows[i], written[i, : step + 1].tolist(), chat, ends):
                        running[i] = False
                num_running = int(running.sum())
                if not num_running:
                    return
                if num_running <= (1 - _COMPACT_SHARE) * len(rows):
                    keep = running.nonzero()[:, 0]
                    rows = [rows[i] for i in keep.tolist()]
                    options["past_key_values"].batch_select_indices(keep)
                    draw.keep(keep)
                    tokens, written, running = tokens[keep], written[keep], running[keep]
                    mask, positions, limits = mask[keep], positions[keep], limits[keep]
            end = width + step + 1
            here = positions[:, end - 1 : end]
            output = self.model(input_ids=tokens[:, None], attention_mask=mask[:, :end], position_ids=here, **options)

    @staticmethod
    def _ended(row: _Row, tokens: list[int], chat: ChatProcessor, ends: set[int]) -> bool:
        """Whether a row is finished: end token, whole JSON object, or its limit."""
        if tokens[-1] in ends or _is_whole(chat.decode(tokens)):
            row.finish_reason = "stop"
        elif len(tokens) < row.limit:
            return False
        row.new_tokens = tokens
        return True


class _Draw:
    """Chooses next tokens: the likeliest where the temperature is 0, else by the row's own random numbers.

    One uniform number a step and row, looked up in the cumulated probabilities, is a multinomial draw that neither
    needs a loop over rows nor depends on the other rows.
    """

    def __init__(self, rows: Sequence[_Row], steps: int, device: torch.device) -> None:
        self._temperatures: torch.Tensor | None = None
        if all(row.temperature == 0 for row in rows):
            return
        self._temperatures = torch.tensor([row.temperature for row in rows], device=device)[:, None]
        uniform = torch.zeros((len(rows), steps), dtype=torch.float64)
        for i, row in enumerate(rows):
            if row.temperature > 0:
                generator = torch.Generator().manual_seed(row.seed)
                uniform[i, : row.limit] = torch.rand(row.limit, dtype=torch.float64, generator=generator)
        self._uniform = uniform.to(device)

    def __call__(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """tokens[B] from logits[B, V]."""
        greedy = logits.argmax(-1)
        if self._temperatures is None:
            return greedy
        scaled = logits.float() / self._temperatures.clamp(min=1e-6)
        cumulated = scaled.softmax(-1).double().cumsum(-1)
        wanted = self._uniform[:, step, None] * cumulated[:, -1:]
        drawn = torch.searchsorted(cumulated, wanted, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
        return torch.where(self._temperatures[:, 0] > 0, drawn, greedy)

    def keep(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        if self._temperatures is not None:
            self._temperatures, self._uniform = self._temperatures[indices], self._uniform[indices]


@dataclass(slots=True)
class _Job:
    """A call of `generate` that waits for the model's thread."""

    requests: list[Request]
    future: Future[list[RawReply | Failure]] = field(default_factory=Future)
    cancelled: bool = False


class LocalBackend:
    """Answers requests with a model in this process; made by `load`."""

    def __init__(
        self,
        decoder: _Decoder,
        chats: tuple[ChatProcessor, ChatProcessor],
        folders: tuple[Path, Path | None],
        image_root: Path,
        batch_tokens: int,
        max_batch: int,
        executor: ThreadPoolExecutor,
        adapter_on: bool,
    ) -> None:
        """Use `load`; this is for it and `with_adapter`. `chats` and `folders`: the base's, then the adapter's."""
        self._decoder = decoder
        self._chats = chats
        self._chat = chats[adapter_on]
        self._folders = folders
        self._executor = executor
        self.image_root = image_root
        self.batch_tokens = batch_tokens
        self.max_batch = max_batch
        self.adapter_on = adapter_on
        self._lock = threading.Lock()
        self._waiting: list[_Job] = []

    @classmethod
    def load(
        cls,
        model_path: Path | str,
        *,
        image_root: Path | str,
        adapter: Path | str | None = None,
        batch_tokens: int = 32768,
        max_batch: int = 64,
        num_threads: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> LocalBackend:
        """Load a model from folders; nothing is downloaded and no code from them is run.

        Args:
            model_path: Folder of the model and its processor.
            image_root: Folder the image paths of requests are relative to.
            adapter: Folder of a PEFT adapter; its own processor or chat template, if it has one, is then used.
            batch_tokens: Most prompt tokens of a batch, padding included; the cache grows beyond it by the replies.
            max_batch: Most rows of a batch; the smaller the model, the more it gains from more of them.
            num_threads: CPU threads; None leaves PyTorch's choice.
            device: `cpu`, `cuda`, ...; None takes the GPU when there is one.
            dtype: Such as `float32`; None is bfloat16 on a GPU, float32 elsewhere.

        Raises:
            UserError: a folder is missing, incomplete, or does not fit the other.
        """
        for name, value in (("batch_tokens", batch_tokens), ("max_batch", max_batch)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        folder = _folder(model_path, "model_path")
        adapter_folder = None if adapter is None else _folder(adapter, "adapter")
        base_chat = ChatProcessor.load(folder, max_image_bytes=_IMAGE_CACHE_BYTES)
        adapter_chat = base_chat if adapter_folder is None else _adapter_chat(folder, adapter_folder, base_chat)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or ("bfloat16" if chosen.type == "cuda" else "float32")
        model = load_model(folder, dtype).to(chosen).eval()
        if any(hasattr(module, "get_rope_index") for module in model.modules()):
            raise UserError(f"{folder}: a model with M-RoPE positions; serve it and use engine api.")
        peft_model = None if adapter_folder is None else load_adapter(model, adapter_folder)
        if adapter_folder is not None:
            check_base(folder, adapter_folder)
            check_adapter(peft_model, adapter_chat, adapter_folder)
        else:
            check_templates(folder)
        return cls(
            _Decoder(model, peft_model),
            (base_chat, adapter_chat),
            (folder, adapter_folder),
            Path(image_root),
            batch_tokens,
            max_batch,
            ThreadPoolExecutor(1, thread_name_prefix="samrag-local"),
            adapter_folder is not None,
        )

    def with_adapter(self, on: bool) -> LocalBackend:
        """The same weights with the adapter on or off (M* and M in one process); lives as long as this backend."""
        if on and self._folders[1] is None:
            raise ValueError("with_adapter(True) on a backend that was loaded without an adapter")
        return LocalBackend(
            self._decoder,
            self._chats,
            self._folders,
            self.image_root,
            self.batch_tokens,
            self.max_batch,
            self._executor,
            on,
        )

    @functools.cached_property
    def identity(self) -> str:
        """Fingerprint of weights, adapter and chat template, not their place; the weights are read once for it."""
        base, adapter = self._folders
        digest = hashlib.sha256(_digest_of(base).encode())
        if self.adapter_on and adapter is not None:
            digest.update(_digest_of(adapter).encode() + _adapter_settings(adapter).encode())
        digest.update(str(self._chat.processor.chat_template).encode())
        return f"local:{digest.hexdigest()[:32]};{str(self._decoder.model.dtype).removeprefix('torch.')}"

    async def generate(self, requests: Sequence[Request]) -> list[RawReply | Failure]:
        """Answer requests, in order.

        Runs in the model's own thread, so the event loop stays free; calls that come while it is busy are answered
        together next, so that one request a call (the concurrent schedule) makes batches all the same.
        """
        if not requests:
            return []
        job = _Job(list(requests))
        with self._lock:
            if not self._waiting:
                self._executor.submit(self._serve)
            self._waiting.append(job)
        try:
            return await asyncio.wrap_future(job.future)
        finally:
            job.cancelled = True  # without effect when it has its reply

    async def close(self) -> None:
        """Take no more requests, here or in a view made by `with_adapter`."""
        self._executor.shutdown(wait=False)

    def text(self, prompt: Prompt) -> str:
        """The chat text a prompt becomes, with the image marker in place of an image's tokens."""
        return self._chat.text([prompt.message()])

    def _serve(self) -> None:
        """Answer all that waits, as one; stops early when nobody wants it any more."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        jobs = [job for job in waiting if job.future.set_running_or_notify_cancel()]
        try:
            requests = [request for job in jobs for request in job.requests]
            replies = self._generate(requests, lambda: all(job.cancelled for job in jobs))
        except BaseException as error:
            for job in jobs:
                job.future.set_exception(error)
            return
        for job in jobs:
            job.future.set_result(replies[: len(job.requests)])
            replies = replies[len(job.requests) :]

    def _generate(self, requests: list[Request], cancelled: Callable[[], bool]) -> list[RawReply | Failure]:
        replies: dict[int, RawReply | Failure] = {}
        rows = []
        for position, request in enumerate(requests):
            row = self._row(position, request)
            if isinstance(row, Failure):
                replies[position] = row
            else:
                rows.append(row)
        for batch in self._batches(rows):
            self._decoder.run(batch, self._chat, self.adapter_on, cancelled)
            if cancelled():
                return []
            for row in batch:
                replies[row.position] = self._reply(row, requests[row.position].kind)
        return [replies[position] for position in range(len(requests))]

    def _reply(self, row: _Row, kind: CallKind) -> RawReply:
        if row.candidates:
            best = max(range(len(row.candidates)), key=row.probabilities.__getitem__)
            text = write("", JUDGEMENTS[kind][best])
            return RawReply(text, "stop", len(row.tokens), 1, row.probabilities[best])
        return RawReply(self._chat.decode(row.new_tokens), row.finish_reason, len(row.tokens), len(row.new_tokens))

    @functools.cache  # noqa: B019 - few kinds, and the backend lives as long as its process
    def _verdict_tokens(self, kind: CallKind) -> tuple[list[int], list[int]]:
        """What all direct replies of a kind begin with, and the token with which each verdict goes on.

        Raises:
            UserError: two verdicts begin with the same token.
        """
        chats = [(ChatMessage("user", ""), ChatMessage("assistant", write("", v))) for v in JUDGEMENTS[kind]]
        replies = self._chat.encode_replies(chats)
        begun = next(i for i, tokens in enumerate(zip(*replies, strict=False)) if len(set(tokens)) > 1)
        candidates = [tokens[begun] for tokens in replies]
        if len(set(candidates)) < len(candidates):
            raise UserError(f"the tokenizer begins two verdicts of {kind} with the same token; use reasoned verdicts.")
        return replies[0][:begun], candidates

    def _row(self, position: int, request: Request) -> _Row | Failure:
        prompt, sampling = request.prompt, request.sampling
        picture = None
        if prompt.image:
            path = within(self.image_root, prompt.image)
            try:
                picture = self._chat.picture(path)
            except IMAGE_ERRORS as error:
                return Failure(FailureReason.BAD_IMAGE, f"{prompt.image}: {error}"[:300])
        text = self.text(prompt)
        (tokens,) = self._chat.encode([text], [[picture.tokens] if picture else []])
        candidates: list[int] = []
        if request.direct:
            beginning, candidates = self._verdict_tokens(request.kind)
            tokens = tokens + beginning
        room = self._decoder.context - len(tokens)
        if room < 1:
            return Failure(
                FailureReason.TOO_LONG, f"{len(tokens)} tokens; the model's context holds {self._decoder.context}"
            )
        limit = min(sampling.max_tokens, room)
        source = f"{sampling.seed}\0{request.sample_index}\0{prompt.image}\0{text}"
        seed = int.from_bytes(hashlib.sha256(source.encode("utf-8", "replace")).digest()[:8], "big") >> 1
        return _Row(position, tokens, picture, limit, sampling.temperature, seed, candidates)

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Rows of similar length, longest first; of one form, and with images of equal shapes."""
        shapes = {row.picture.shapes for row in rows if row.picture}
        first = min(shapes, default=None, key=str)
        for direct in (False, True):
            for shape in sorted(shapes, key=str) if shapes else (None,):
                group = [
                    row
                    for row in rows
                    if bool(row.candidates) is direct and (row.picture.shapes if row.picture else first) == shape
                ]
                group.sort(key=lambda row: -len(row.tokens))
                while group:
                    size = max(1, min(self.max_batch, self.batch_tokens // len(group[0].tokens)))
                    yield group[:size]
                    group = group[size:]


def _folder(path: Path | str, name: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{name}: there is no folder {folder}; download the model first, or check the path.")
    return folder


def _adapter_chat(folder: Path, adapter: Path, base: ChatProcessor) -> ChatProcessor:
    """What the adapter was trained with: its own processor, or the base's with its own chat template."""
    if any((adapter / name).is_file() for name in _PROCESSOR_FILES):
        return ChatProcessor.load(adapter, max_image_bytes=_IMAGE_CACHE_BYTES)
    template = adapter / "chat_template.jinja"
    if not template.is_file():
        return base
    text = template.read_text(encoding="utf-8")
    return ChatProcessor.load(folder, text, max_image_bytes=_IMAGE_CACHE_BYTES)


def _digest_of(folder: Path) -> str:
    """Digests of a folder's weight files."""
    return ";".join(f"{path.name}={sha256(path)}" for path in sorted(folder.glob("*.safetensors")))


def _adapter_settings(folder: Path) -> str:
    """The settings that change what an adapter does; not where its base lay when it was trained."""
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    names = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
    return json.dumps({name: settings.get(name) for name in names}, sort_keys=True)
